"""What an engine goes on from of a sample that it had before: which weights computed it."""

from collections import OrderedDict
from collections.abc import Hashable

_MOST = 4096
"""Samples; those that were begun longest ago are forgotten."""


class KeptPrefixes:
    """Samples that keep their keys and values over new weights keep them too when they lose their seat or are given
    back and go on here: their prefix stays apart, in the engine's cache, with those of the weights that began them.

    >>> kept = KeptPrefixes(keep=True)
    >>> kept.since("a", 3), kept.since("b", 4), kept.since("a", 5)
    (3, 4, 3)
    """

    def __init__(self, *, keep: bool) -> None:
        """Without `keep` tokens are sampled behind what the weights in use computed, and nothing else."""
        self._keep = keep
        self._since: OrderedDict[Hashable, int] = OrderedDict()

    def since(self, sample: Hashable, loads: int) -> int:
        """How many loads of weights there had been in the engine when it first began the sample; there are `loads`."""
        if not self._keep:
            return loads
        since = self._since.setdefault(sample, loads)
        self._since.move_to_end(sample)
        if len(self._since) > _MOST:
            self._since.popitem(last=False)
        return since

    def forget(self) -> None:
        """The engine had weights that nothing may go on from."""
        self._since.clear()
