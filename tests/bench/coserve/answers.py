"""What a user saw of one request, and the latencies that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer; all times are Unix seconds of the client's process."""

    scheduled_at: float
    """When the user was to come. A client that is late itself does not shorten anybody's wait."""
    chunks_at: tuple[float, ...]
    """When text came; a chunk may hold several tokens."""
    tokens: int
    """As the server counted them; of a request that failed, the chunks that came."""
    error: str = ""
    measured: bool = True
    """False for the warm-up."""

    @property
    def ttft_s(self) -> float:
        """From the scheduled arrival to the first token; infinite where none came."""
        return self.chunks_at[0] - self.scheduled_at if self.chunks_at and not self.error else math.inf

    @property
    def tpot_s(self) -> float:
        """(last - first token) / (tokens - 1); infinite where the request failed."""
        if self.error or not self.chunks_at:
            return math.inf
        return (self.chunks_at[-1] - self.chunks_at[0]) / max(1, self.tokens - 1)

    def longest_wait(self, start: float, stop: float) -> float | None:
        """The longest wait for a token, the first included, that overlaps [start, stop]; None where none does."""
        waits = pairwise((self.scheduled_at, *self.chunks_at))
        return max((after - since for since, after in waits if since < stop and after > start), default=None)


def tokens_between(answers: Sequence[Answer], start: float, stop: float) -> float:
    """Tokens that came in [start, stop): each answer's are spread evenly over its chunks."""
    return sum(
        answer.tokens * sum(start <= at < stop for at in answer.chunks_at) / len(answer.chunks_at)
        for answer in answers
        if answer.chunks_at
    )
