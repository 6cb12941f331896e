"""Named moments of a step, in their order, see `rollout.milestone`; between any two of them a crash leaves something
else half done.

    journaled -> updated -> version_reserved -> version_exported -> version_written -> version_current
              -> checkpoint_sealed -> checkpoint_renamed -> settled

Where a push reaches replicas by a collective, between version_written and version_current and beside what follows:

    invited -> frozen -> sent
"""

from enum import StrEnum


class Milestone(StrEnum):
    """What has just been done."""

    JOURNALED = "journaled"
    """The step's decisions are durable."""
    UPDATED = "updated"
    """The optimizer's step was taken, in memory."""
    VERSION_RESERVED = "version_reserved"
    """The next version has its number and no byte."""
    VERSION_EXPORTED = "version_exported"
    """All of its bytes are there, and no manifest."""
    VERSION_WRITTEN = "version_written"
    """Its artefact is complete."""
    VERSION_CURRENT = "version_current"
    """The pointer names it."""
    CHECKPOINT_SEALED = "checkpoint_sealed"
    """The checkpoint is complete, under its temporary name."""
    CHECKPOINT_RENAMED = "checkpoint_renamed"
    """It is the run's newest."""
    SETTLED = "settled"
    """The groups that it contains have left the queue."""


class PushMilestone(StrEnum):
    """What has just been done of a push that has replicas to reach."""

    INVITED = "invited"
    """The epoch is open, for a version that the pointer does not name yet."""
    FROZEN = "frozen"
    """Its members are fixed, and wait for the first byte."""
    SENT = "sent"
    """They have the bytes; none is known to have taken them into use."""
