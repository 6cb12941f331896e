"""How many engine replicas there are: as many as users' load needs, and more for rollouts inside a budget only.

arrivals x idle service time (`demand`) -> lasting change (`steady`) -> + lent + budget (`decision`) -> Serve (`policy`)

Serve's controller runs `UserLoadPolicy` and gets this package by value. It imports nothing but the standard library and
itself, so that the controller needs nothing of Nightshift's.
"""

from services.autoscaling.policy import UserLoadPolicy

__all__ = ["UserLoadPolicy"]
