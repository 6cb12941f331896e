"""How much is measured: of how many users, for how long, at which loads."""

from dataclasses import dataclass, replace

from .arms import ARMS, DAY, GUARD, ROLLOUTS, UNGUARDED, USERS


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the full run."""

    arms: tuple[str, ...] = ARMS
    loads: tuple[str, ...] = ("80", DAY, "50", "20")
    """In the order in which they are measured: the nearer to the capacity, the sooner after it was found. On a machine
    that became slower by a fifth meanwhile 80 % of it would be all there is, while 20 % would still be little."""
    seed: int = 1
    replicas: int = 1
    seats: int = 32
    """Of each engine."""
    users: int = 300
    """Of an arm at a load, at least."""
    rounds: int = 4
    """In which the arms of a load take turns, every second time backwards, so that a machine whose speed drifts is as
    slow for all of them. The arm without a guard has the first as many of them as `users` need."""
    sweep_rounds: int = 2
    """The first of these rounds, in which constants around the guard's seats are among the arms; in the rest there are
    two of them, with users alone and the guard."""
    day_rounds: int = 2
    day_sweep_rounds: int = 1
    """The same of the day; the arm without a guard has one of them."""
    round_s: float = 40.0
    """Of each of them, at least: on a fast machine `users` are there in a few seconds, of which no queue comes to its
    length and no push has its share; and of 300 users four are more than the point that the guard may cost."""
    user_prompt: int = 32
    user_tokens: int = 32
    """Tokens of each user's prompt and answer."""
    prefill_chunk: int = 32
    """Most tokens of a prompt in one step, `fleet.engine.long_prefill_token_threshold`: a user waits for no more of a
    rollout's than another user has."""
    first_token_steps: int = 4
    """Most steps in a row without rollouts while users' prompts are computed."""
    idle_users: int = 60
    probe_users: int = 60
    probe_s: float = 15.0
    """The most of both, at each rate that the capacity search tries."""
    confirm_users: int = 300
    confirm_s: float = 160.0
    """At the rate that it finds, as long as an arm has at a load: who is quick for a minute, in which no crowd came,
    has not that capacity."""
    arrival_users: int = 100
    day_s: float = 150.0
    """What a day takes, or as long as `users` take to come."""
    day_peak: float = 0.8
    """Share of capacity in the day's busiest hour."""
    warm_s: float = 12.0
    """Before each round's measured time. Rollouts fill the seats within three seconds: a group's prompt is computed
    within eight steps, and then by the prefill pace a sample or more of the group begins with every step. The guard has
    the limit that the round before left."""
    first_warm_s: float = 40.0
    """Before the first round of the guard on a fleet, where its limit begins with a few seats and grows by some a
    second."""
    rollouts_s: float = 120.0
    steal_before: float = 0.05
    """Share of the processors that another guest may have in the second before a round, which waits otherwise."""
    steal: float = 0.0004
    """The same of a round; one with more is measured again, once it has been less for a while. Five ticks in a minute
    of two processors seem nothing, but whoever takes them shares caches, memory or a core's other thread too: users'
    steps were seen half as long again, for half an hour at a time."""
    steal_moment: float = 0.15
    """The same of any two seconds of it."""
    repeats: int = 20
    """Rounds that may be, of one call; the fewer are left, the more they must have lost. What users and rollouts felt
    in a round has no say in it."""
    patience_s: float = 3600.0
    """That the run may wait for a machine that has its processors."""
    push_every_s: float = 20.0
    push_rollouts: str = "keep"
    """`fleet.push.rollouts`. Pushes come so often that rollouts would be computed again half of the time."""


QUICK = replace(
    Plan(),
    arms=(ROLLOUTS, USERS, GUARD, UNGUARDED),
    loads=("50",),
    users=200,
    rounds=2,
    idle_users=40,
    confirm_s=60.0,
    rollouts_s=45.0,
    repeats=3,
    patience_s=300.0,
)
"""Within a quarter of an hour on two cores."""

PUSHES = replace(
    Plan(),
    arms=(GUARD,),
    loads=("50",),
    replicas=2,
    rounds=1,
    round_s=180.0,
    idle_users=40,
    probe_s=10.0,
    confirm_users=120,
    confirm_s=20.0,
    repeats=3,
    patience_s=300.0,
)
"""Of `make bench-push`: users at half of what is quickly found to be the capacity of two replicas, for nine pushes."""
