"""Whether to start the workers again after one was lost."""


class Restarts:
    """At most `limit` in a row; a checkpoint in between begins a new row, because then the run gets on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._checkpoint = -1
        self.in_a_row = 0

    def allow(self, checkpoint: int) -> bool:
        """Count a loss, after which the run would go on from that step (0: from the start)."""
        if checkpoint > self._checkpoint:
            self.in_a_row = 0
        self._checkpoint = checkpoint
        self.in_a_row += 1
        return self.in_a_row <= self._limit
