"""A run on one fleet: the SLO, the capacity, cell after cell, and the idle users once more."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.copying import copy_times
from tests.bench.say import say

from .arms import ARRIVAL, CONSTANT, DAY, GUARD, ROLLOUTS, UNGUARDED, USERS, Cell, batches, cells, duel
from .arrival import arrival_figures
from .compare import FEW_USERS, comparison, duels, too_few
from .figures import Figures
from .idle import capacity_figures, idle_again, idle_figures
from .measure import latencies, record
from .plan import Plan
from .report import table
from .seen import Seen
from .session import Session, load_rate, users_of
from .slo import TARGET, CapacitySearch, Slo, first_rate, slo_of
from .sweep import Sweep

_MOST_DUELS = 2
"""Of a load; each takes minutes, and of a machine whose speed changes all the time none would be the last."""


class Run:
    """Goes on with what `figures` has already."""

    def __init__(self, one: Session, plan: Plan, figures: Figures) -> None:
        self._one = one
        self._plan = plan
        self._figures = figures

    async def all(self, directory: Path) -> None:
        """Everything that the plan has and the figures have not; `directory` is where bytes are copied."""
        one, plan, figures = self._one, self._plan, self._figures
        one.quiet.repeated = list(figures.content.get("repeated", []))
        one.quiet.waited_s = figures.content.get("waited_s", 0.0)
        self._compare()
        await self._settle()
        await one.warm_up()
        if "slo" not in figures.content:
            await self._idle()
        wanted = [cell for cell in cells(plan.arms, plan.loads) if cell.key not in figures.cells]
        at_loads = CONSTANT in plan.arms or any(cell.load for cell in wanted)
        if figures.content.get("capacity", {"rate": None})["rate"] is None and at_loads:
            await self._capacity()
        await one.pusher.prepare()
        if "copy_s" not in figures.content:
            figures.put(copy_s=latencies(copy_times(one.pusher.num_bytes, directory)), push_bytes=one.pusher.num_bytes)
        for load in ("", *plan.loads):
            for batch in batches([cell for cell in wanted if cell.load == load]):
                await self._batch(batch)
                left = sum(cell.key not in figures.cells for cell in wanted)
                say(f"{left} cells{' and constants' if CONSTANT in plan.arms else ''} to go")
            if load and CONSTANT in plan.arms:  # while the machine is what the arms had
                await self._sweep(load)
        await self._idle_again()

    @property
    def _slo(self) -> Slo:
        return Slo(**self._figures.content["slo"])

    async def _settle(self) -> None:
        """Once a run: what goes on with it is held against what was measured by the first."""
        quiet, content = self._one.quiet, self._figures.content
        if "usual_steal" in content:
            quiet.allow(content["usual_steal"])
            return
        self._figures.put(usual_steal=(usual := await quiet.settle()))
        say(f"others take {usual or 0.0:.2%} of the processors' time: rounds with {quiet.steal:.2%} are measured again")

    async def _idle(self) -> None:
        say("users one at a time ...")
        answers, host = await self._one.idle()
        slo = slo_of(answers)
        prefill_token_s = await self._one.engines.prefill_token_s()
        self._figures.put(idle=idle_figures(answers, host) | {"prefill_token_s": prefill_token_s}, slo=asdict(slo))
        say(f"SLO: TTFT {1000 * slo.ttft_s:.0f} ms, TPOT {1000 * slo.tpot_s:.0f} ms")

    async def _idle_again(self) -> None:
        say("users one at a time, once more ...")
        answers, host = await self._one.idle(name="idle-again")
        found = idle_again(self._figures.content["idle"], idle_figures(answers, host))
        self._figures.put(idle_again=found)
        say(f"beside the beginning: TTFT {found['ttft_ratio'] or 0:.2f}, TPOT {found['tpot_ratio'] or 0:.2f}")

    async def _capacity(self) -> None:
        idle = self._figures.content["idle"]
        first = first_rate(idle["ttft_s"]["p50"], idle["tpot_s"]["p50"], self._plan.user_tokens)
        search, probes = CapacitySearch(first=first), list[dict[str, Any]]()
        while (rate := search.rate()) is not None:
            share, host = await self._one.probe(search, rate, self._slo, number=len(probes))
            probes.append(capacity_figures(search, rate, share, host))
            say(f"users alone at {rate:.2f}/s: {100 * share:.1f} % inside the SLO")
            search = search.after(rate, share)
            self._figures.put(capacity={"rate": search.good if search.confirmed else None, "probes": probes})

    async def _batch(self, batch: Sequence[Cell]) -> None:
        rounds = await self._rounds(batch)
        for cell in batch:
            self._keep(rounds[cell])
        self._figures.put(repeated=self._one.quiet.repeated, waited_s=self._one.quiet.waited_s)
        say(f"\n{table({cell.key: self._figures.cells[cell.key] for cell in batch})}")
        for cell in batch:
            if cell.arm == USERS and (inside := self._figures.cells[cell.key]["attainment"]) < TARGET:
                say(f"{cell.key}: {inside:.1%} inside the SLO: the machine is slower than when its capacity was found")

    async def _sweep(self, load: str) -> None:
        """The constants that find the oracle of a load."""
        search = Sweep(self._plan.seats, first=self._guess(load))
        while True:
            while (seats := search.seats()) is not None:
                kept = await self._keeps(load, seats)
                say(f"{seats} rollouts {'keep' if kept else 'break'} the SLO at {load}")
                search = search.after(seats, kept=kept)
            best = self._oracle(load)["seats"]
            if not await self._duel(load, best) or not best or not self._too_few(load, best):
                return
            constants = self._oracle(load)["constants"]
            say(f"{best} rollouts break the SLO at {load} in turns")
            fewer = (int(seats) for seats, one in constants.items() if one["keeps"] and int(seats) < best)
            search = Sweep(self._plan.seats, kept=max(fewer, default=0), broke=best)

    def _guess(self, load: str) -> int | None:
        """Seats that rollouts held under the guard, on average."""
        guard = self._figures.cells.get(Cell(GUARD, load).key)
        held = [seats for seats in guard["series"]["seats_rollouts"] if seats is not None] if guard else []
        return max(1, round(sum(held) / len(held))) if held else None

    def _oracle(self, load: str) -> dict[str, Any]:
        found: dict[str, Any] = self._figures.content["comparison"][load]["oracle"]
        return found

    async def _keeps(self, load: str, seats: int) -> bool:
        """Whether a constant keeps the SLO: where few users of its rounds stand against it, in turns too."""
        if left := self._missing([Cell(CONSTANT, load, seats)]):
            await self._batch(left)
        if 0 < self._too_few(load, seats) <= FEW_USERS and load != DAY:
            await self._duel(load, seats, most=_MOST_DUELS - 1)  # the last one is the best constant's
        return not self._too_few(load, seats)

    def _too_few(self, load: str, seats: int) -> int:
        return too_few(self._figures.cells, load, seats)

    async def _duel(self, load: str, seats: int, *, most: int = _MOST_DUELS) -> bool:
        """Whether users alone, the guard and a constant have taken turns, now or before; not where the load had `most`
        of them, or no guard."""
        if not (left := self._missing(duel(load, seats))):
            return True
        if GUARD not in self._plan.arms or len(duels(self._figures.cells, load)) >= most:
            return False
        await self._batch(left)
        return True

    def _missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in wanted if cell.key not in self._figures.cells]

    def _found_rate(self, load: str) -> float:
        """The capacity, users a second; 0 for what has no load and may come before it is found."""
        return float(self._figures.content["capacity"]["rate"]) if load else 0.0

    def _turns(self, cell: Cell) -> range:
        return turns_of(cell, self._plan, load_rate(cell.load, self._found_rate(cell.load), self._plan))

    async def _rounds(self, batch: Sequence[Cell]) -> dict[Cell, list[Seen]]:
        """Of each cell; several take turns, every second time backwards."""
        capacity = self._found_rate(batch[0].load)
        turns = {cell: self._turns(cell) for cell in batch}
        found: dict[Cell, list[Seen]] = {cell: [] for cell in batch}
        for number, turn in enumerate(max(turns.values(), key=len)):
            for cell in batch if number % 2 == 0 else reversed(batch):
                if turn not in turns[cell]:
                    continue
                place = f"{cell.key}, round {number + 1} of {len(turns[cell])}" if len(turns[cell]) > 1 else cell.key
                async with _progress(self._one, place):
                    found[cell].append(await self._one.cell(cell, self._slo, capacity, turn=turn))
        return found

    def _keep(self, rounds: Sequence[Seen]) -> None:
        alone, plan = self._figures.cells.get(ROLLOUTS), self._plan
        found = record(rounds, self._slo, alone and alone["harvested_tokens_s"], seed=plan.seed)
        if rounds[0].cell.arm == ARRIVAL:
            idle_ttft_s = self._figures.content["idle"]["all_ttft_s"]
            found["arrival"] = arrival_figures(rounds[0], idle_ttft_s, seats=plan.seats * plan.replicas)
        self._figures.keep(rounds, found)
        self._compare()

    def _compare(self) -> None:
        """Every load that was measured, in this call or before."""
        measured = self._figures.cells
        loads = sorted({cell["load"] for cell in measured.values() if cell["load"]})
        self._figures.put(comparison=comparison(measured, loads))


def turns_of(cell: Cell, plan: Plan, rate: float) -> range:
    """Which of a load's rounds, to which users come at `rate`, it has: the damage without the guard is seen of the
    fewest users that an arm may have.

    >>> plan, constant, again = Plan(), Cell(CONSTANT, "50", 8), Cell(CONSTANT, "50", 8, again=True)
    >>> [turns_of(cell, plan, 5.0) for cell in (Cell(USERS, "50"), constant, again)]
    [range(0, 2), range(0, 2), range(2, 4)]
    >>> turns_of(Cell(USERS, "50"), Plan(arms=(USERS, GUARD)), 5.0), turns_of(Cell(CONSTANT, DAY, 8), plan, 5.0)
    (range(0, 4), range(0, 1))
    >>> [len(turns_of(Cell(UNGUARDED, "50"), plan, rate)) for rate in (1.0, 3.0, 5.0, 10.0)]
    [4, 3, 2, 1]
    """
    if cell.load == DAY or cell.arm not in {USERS, GUARD, UNGUARDED, CONSTANT}:
        return range(1)
    if cell.arm == UNGUARDED:
        return range(math.ceil(plan.users * plan.rounds / users_of(plan, rate)))
    first = range(min(plan.sweep_rounds, plan.rounds))
    if cell.again:
        return range(len(first), plan.rounds) or first
    return first if cell.arm == CONSTANT or {GUARD, CONSTANT} <= {*plan.arms} else range(plan.rounds)


@asynccontextmanager
async def _progress(one: Session, place: str) -> AsyncIterator[None]:
    """A line that says where the run is: renewed on a terminal, else printed once."""
    say(f"{place} ...")
    started = time.monotonic()

    async def renew() -> None:
        while sys.stdout.isatty():
            print(f"\r\033[K{place}: {time.monotonic() - started:.0f} s, {one.now()}", end="", flush=True)
            await asyncio.sleep(1.0)
        await asyncio.Event().wait()

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        print("\r\033[K" if sys.stdout.isatty() else "", end="", flush=True)
