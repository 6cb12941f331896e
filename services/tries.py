"""How often, and when, a replica tries a version of which it could not prove that it computes what it should.

A version that fails its check is given up in time. One whose check the engine had no time for is not: users who keep
every seat are no sign of wrong weights, and nothing else would try it when they have left.
"""

_ATTEMPTS = 3
"""Times one version may fail its check before the replica waits for the next."""
_LONGEST_WAIT_S = 600.0
"""Before a version whose check the engine had no time for is tried again; each such try makes users wait for a load."""

_LONGEST_PATIENCE = 10
"""Times the wait after the first failure."""

Key = tuple[str, int, str]
"""Run, version and digest. The version belongs to it: weights that no step changed are published again under the digest
that they had."""


def patience(failures: int) -> int:
    """How many times as long as after the first of so many failures in a row to wait before the next look: one for a
    version that is damaged reads all of it.

    >>> [patience(failures) for failures in (1, 3, 99)]
    [1, 3, 10]
    """
    return min(failures, _LONGEST_PATIENCE)


class Tries:
    """Of the version that was tried last; to try another one forgets it."""

    def __init__(self, first_wait_s: float) -> None:
        """After the first check that was not answered it is so long until the next, and twice as long each time."""
        self._first_wait_s = first_wait_s
        self._key: Key | None = None
        self._failed = self._unanswered = 0
        self._not_before = 0.0

    def left(self, key: Key, now: float) -> bool:
        """Whether the version may be tried at `now` (monotonic seconds)."""
        return key != self._key or (self._failed < _ATTEMPTS and now >= self._not_before)

    def ended(self, key: Key, now: float, *, verified: bool, unanswered: bool) -> None:
        """One try of it; `unanswered` where the engine had no time for the check.

        >>> tries, key = Tries(30.0), ("run", 7, "digest")
        >>> for _ in range(2):
        ...     tries.ended(key, 0.0, verified=False, unanswered=True)
        >>> tries.left(key, 59.0), tries.left(key, 60.0), tries.left(("run", 8, "digest"), 0.0)
        (False, True, True)
        >>> for _ in range(3):
        ...     tries.ended(key, 60.0, verified=False, unanswered=False)
        >>> tries.left(key, 1e9)
        False
        """
        if key != self._key or verified:
            self._key, self._failed, self._unanswered, self._not_before = key, 0, 0, 0.0
        if unanswered:
            self._not_before = now + min(self._first_wait_s * 2**self._unanswered, _LONGEST_WAIT_S)
            self._unanswered += 1
        elif not verified:
            self._failed, self._unanswered = self._failed + 1, 0
