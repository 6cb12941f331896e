"""Errors of the rollout layer; each also inherits the standard type that callers would catch."""


class NightshiftError(Exception):
    """Base of every error Nightshift raises on purpose."""


class ConfigError(NightshiftError, ValueError):
    """A configuration that cannot work; the message names both values and the knob."""


class CodecError(NightshiftError, ValueError):
    """Bytes that are not a record of this or the previous schema."""


class RecordingError(ConfigError):
    """A file that is no recording, or one that is damaged before its end."""


class IdempotencyConflict(NightshiftError, ValueError):
    """The idempotency key was used before with another body, as `submission_id` where the caller may know it."""

    def __init__(self, message: str, submission_id: str | None = None) -> None:
        super().__init__(message)
        self.submission_id = submission_id


class QueueFull(NightshiftError, RuntimeError):
    """Accepting the groups would pass the depth bound; retry after `retry_after_s`, unless they can `never` fit."""

    def __init__(self, message: str, retry_after_s: float = 1.0, *, never: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.never = never

    @classmethod
    def at(cls, pending: int, more: int, max_depth: int) -> "QueueFull":
        """`more` groups were to be added to `pending`."""
        hint = ", which not even an empty queue has room for" if more > max_depth else ""
        message = f"{pending} groups pending and {more} more would pass max_depth={max_depth}{hint}"
        return cls(message, never=more > max_depth)


class LeaseLost(NightshiftError, RuntimeError):
    """The lease expired, was taken over or cancelled; nothing was written."""


class NotFound(NightshiftError, KeyError):
    """No such submission or group in this run."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotDead(NightshiftError, ValueError):
    """A group that cannot be tried again: not dead, taken by the trainer, or of no record any more."""


class Gone(NightshiftError, KeyError):
    """The result was kept for `retain_s` and is no longer there."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Fenced(NightshiftError, PermissionError):
    """The writer's fencing token is not the run's newest one."""


class WriterBusy(NightshiftError, PermissionError):
    """Another live writer holds the run."""


class WeightsError(NightshiftError, RuntimeError):
    """A published version is missing, incomplete or does not match its digest."""


class StoreUnavailable(NightshiftError, ConnectionError):
    """Redis did not answer; nothing is known to have been written."""


class StoreFull(StoreUnavailable):
    """Redis refused a write that may grow its memory, which is at its limit; nothing was written."""


class RewardError(NightshiftError, RuntimeError):
    """A verifier raised, timed out or returned something that is not a finite number."""
