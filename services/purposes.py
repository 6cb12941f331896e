"""Which groups a replica may lease, given the weights it has and the pin of an evaluation."""

from collections.abc import Collection, Sequence

from rollout.board import Pin
from rollout.types import Purpose


def leasable(
    configured: Sequence[Purpose],
    *,
    run: str,
    weights: Collection[str | None],
    pin: Pin | None,
    replica: str,
    version: int,
) -> list[Purpose]:
    """Purposes of `run` that a healthy replica may lease.

    Training only where nobody else's `weights` are in use or on their way: they are of these runs, None stands for the
    model as loaded. A pinned replica works for the pin's evaluation alone, and no other replica does, so that all of it
    comes from one version.
    """
    alone = set(weights) <= {None, run}
    allowed = [purpose for purpose in configured if purpose is not Purpose.TRAIN or alone]
    if pin is None:
        return allowed
    if pin.replica == replica:
        held = (pin.run, pin.version) == (run, version) and run in weights and alone
        return [purpose for purpose in allowed if held and purpose is Purpose.EVAL]
    return [purpose for purpose in allowed if run != pin.run or purpose is not Purpose.EVAL]
