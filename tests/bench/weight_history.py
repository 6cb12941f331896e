"""The newest versions of a policy's weights, so that a step can sample with older ones."""

from collections import deque
from collections.abc import Mapping

from torch import Tensor

Weights = Mapping[str, Tensor]


class WeightHistory:
    """Remembers as many versions as it takes to look `staleness` of them back."""

    def __init__(self, staleness: int) -> None:
        self._versions: deque[tuple[int, Weights]] = deque(maxlen=staleness + 1)

    def append(self, version: int, weights: Weights) -> None:
        """The newest from now on."""
        self._versions.append((version, weights))

    @property
    def stale(self) -> tuple[int, Weights]:
        """The version `staleness` before the newest, or the first where there were not so many yet."""
        return self._versions[0]

    @property
    def newest(self) -> tuple[int, Weights]:
        return self._versions[-1]
