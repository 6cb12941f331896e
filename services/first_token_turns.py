"""When an engine's steps are users' alone, for their first tokens."""

STEPS = "nightshift_first_token_steps"
"""Key of vLLM's `additional_config` by which the engine's process learns how many in a row."""


class FirstTokenTurns:
    """Steps without rollouts while a user waits for a first token, so many in a row at most: where somebody always
    waits, rollouts go on with every next one.

    >>> turns = FirstTokenTurns(most=2)
    >>> [turns.next(awaited=awaited) for awaited in (False, True, True, True, True)]
    [False, True, True, False, True]
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._taken = 0

    def next(self, *, awaited: bool) -> bool:
        """Whether the next step is without rollouts; `awaited` says whether a user waits for a first token."""
        alone = awaited and self._taken < self._most
        self._taken = self._taken + 1 if alone else 0
        return alone

    def in_vain(self) -> None:
        """The step brought no user nearer to a first token: the next one is with rollouts."""
        self._taken = self._most
