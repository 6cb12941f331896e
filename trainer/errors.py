"""Errors of the trainer."""

from rollout.errors import NightshiftError


class ModelError(NightshiftError, ValueError):
    """A model directory that cannot be trained; the message says what is missing or wrong."""


class CheckpointError(NightshiftError, RuntimeError):
    """Checkpoints exist but none is complete and undamaged; a fresh start would lose the run silently."""


class ForeignServer(NightshiftError, RuntimeError):
    """The server is not the one that the run has used, or has lost its data."""


class OlderServer(NightshiftError, RuntimeError):
    """The server's data are older than the run's newest checkpoint by so much that groups would be trained again."""


class NothingToTrain(NightshiftError, RuntimeError):
    """Group after group ends dead and none can be trained; the message carries the last reason."""


class TrainingDiverged(NightshiftError, ArithmeticError):
    """Too many steps in a row had a non-finite loss or gradient; the weights are those before them."""


class WorkerDied(NightshiftError, RuntimeError):
    """A worker process of a role group ended or did not start."""


class WorkerLost(WorkerDied):
    """The same while training was on its way: the run can go on from its newest checkpoint with new workers."""
