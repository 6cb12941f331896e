"""Named moments of a rollout on its way through gateway and replica, see `rollout.milestone`.

gateway:    accepted
replica:    leased -> [salvaged]* -> generated -> scored -> handed_in
                   -> [salvaged]  -> given_back
"""

from enum import StrEnum


class Milestone(StrEnum):
    """What has just been done."""

    ACCEPTED = "accepted"
    """The queue has the groups of a call, and its client no answer."""
    LEASED = "leased"
    """A group is the replica's, which has begun nothing of it."""
    SALVAGED = "salvaged"
    """The queue keeps what there is of its samples."""
    GENERATED = "generated"
    """All of its samples have ended, none is scored."""
    SCORED = "scored"
    """They are, and the queue knows nothing of it."""
    HANDED_IN = "handed_in"
    """The queue has the group."""
    GIVEN_BACK = "given_back"
    """The group waits for another lease."""
