"""An engine's places for the adapters that rollouts run on: which one is in use, which is being loaded, which leave.

    reserve -> LOADING -- promote --> CURRENT -- the next promote --> LEAVING -- unloaded --> its place is free
                  \\----- drop ----------------------------------------/

New requests begin on the current adapter and finish on the one that they began with, so one that leaves is unloaded
when its last request has ended. Until then it has its place, because the engine may compute with it in any step: more
adapters than places would make the engine unload one that is in use, and hold up whoever waits for its own.
"""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path


class Phase(Enum):
    """Of one adapter."""

    LOADING = auto()
    """In the engine or on its way there, and not verified."""
    CURRENT = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class Adapter:
    """One version in one place. A version that is loaded again is another adapter."""

    number: int
    """Never given twice in the life of an engine."""
    version: int
    directory: Path
    phase: Phase = Phase.LOADING
    requests: int = 0
    """That have begun on it and not ended."""

    @property
    def name(self) -> str:
        """Unique for its content in this engine, which keeps prefixes that it computed by name and directory."""
        return f"v{self.version}-{self.number}"


class AdapterPlaces:
    """The bookkeeping; what it says is done by `rollout_adapters`."""

    def __init__(self, places: int, *, first: int = 1) -> None:
        """`first` is the number of the first adapter; smaller ones are for others."""
        if places < 2:
            raise ValueError(f"places={places}: while a version is loaded the one in use needs a place too")
        self._places = places
        self._next = first
        self._adapters: list[Adapter] = []

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that have a place, the oldest first."""
        return tuple(self._adapters)

    @property
    def current(self) -> Adapter | None:
        """What new requests begin on; None for the model as loaded."""
        return self._in(Phase.CURRENT)

    @property
    def loading(self) -> Adapter | None:
        return self._in(Phase.LOADING)

    @property
    def full(self) -> bool:
        return len(self._adapters) == self._places

    @property
    def idle(self) -> tuple[Adapter, ...]:
        """To be unloaded: they leave, and no request is on them."""
        return tuple(a for a in self._adapters if a.phase is Phase.LEAVING and not a.requests)

    @property
    def in_the_way(self) -> Adapter | None:
        """Whose requests are to be cut for a new version to find a place: the oldest that leaves, once all are taken.

        A sample that is cut goes on with the current version, from the tokens it has. To wait instead would hold the
        new version back for as long as the longest sample takes, and every sample that begins meanwhile would be a
        version older.
        """
        leaving = (a for a in self._adapters if a.phase is Phase.LEAVING)
        return next(leaving, None) if self.full else None

    def reserve(self, version: int, directory: Path) -> Adapter:
        """A place for a version that is to be loaded. Raises ValueError without a free place."""
        if self.full or self.loading is not None:
            raise ValueError(f"version {version} finds none of {self._places} places free: {self.described}")
        adapter = Adapter(self._next, version, directory)
        self._next += 1
        self._adapters.append(adapter)
        return adapter

    def promote(self, adapter: Adapter) -> None:
        """The adapter that was being loaded is current from now on."""
        self._expect(adapter, Phase.LOADING)
        if (before := self.current) is not None:
            before.phase = Phase.LEAVING
        adapter.phase = Phase.CURRENT

    def drop(self, adapter: Adapter) -> None:
        """The adapter that was being loaded is not to be used."""
        self._expect(adapter, Phase.LOADING)
        adapter.phase = Phase.LEAVING

    def unloaded(self, adapter: Adapter) -> None:
        """The engine has forgotten it. Raises ValueError while requests are on it."""
        self._expect(adapter, Phase.LEAVING)
        if adapter.requests:
            raise ValueError(f"{adapter.name} was unloaded under {adapter.requests} requests")
        self._adapters.remove(adapter)

    @property
    def described(self) -> str:
        """For messages."""
        return ", ".join(f"version {a.version} ({a.phase.name.lower()}, {a.requests} requests)" for a in self._adapters)

    def _in(self, phase: Phase) -> Adapter | None:
        return next((a for a in self._adapters if a.phase is phase), None)

    def _expect(self, adapter: Adapter, phase: Phase) -> None:
        if adapter not in self._adapters or adapter.phase is not phase:
            raise ValueError(f"{adapter.name} is not {phase.name.lower()}: {self.described}")
