"""Named moments of a step, in their order, see `rollout.milestone`; between any two of them a crash leaves something
else half done.

    journaled -> updated -> version_reserved -> version_written -> version_current
              -> checkpoint_sealed -> checkpoint_renamed -> settled
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
