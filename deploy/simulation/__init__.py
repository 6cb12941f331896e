"""A model of fleet, users, rollouts and trainer that decides by the product's own functions. See docs/simulate.md.

trace -> users ----> replica (seat keeper, guard, seats) ----> parts -> report, plot
           |            ^            |
           |            engine model |-> work (staleness) -> pushes
           +-> scaling (autoscaling decisions)
"""
