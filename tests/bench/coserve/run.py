"""A run on one fleet: the SLO, the capacity, cell after cell, and the idle users once more."""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.copying import copy_times
from tests.bench.say import say

from .arms import ARRIVAL, CONSTANT, DAY, GUARD, ROLLOUTS, UNGUARDED, USERS, Cell, cells
from .arrival import arrival_figures
from .compare import comparison
from .figures import Figures
from .idle import capacity_figures, idle_again, idle_figures
from .measure import held, latencies, record
from .plan import Plan
from .report import table
from .seen import Seen
from .session import Session, load_rate, users_of
from .slo import TARGET, CapacitySearch, Slo, first_rate, slo_of
from .sweep import finalists, grid

Taken = dict[Cell, list[Seen]]
"""The rounds that each cell has had."""


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
        if figures.content.get("capacity", {"rate": None})["rate"] is None and (set(plan.arms) - {ROLLOUTS, ARRIVAL}):
            await self._capacity()
        await one.pusher.prepare()
        if "copy_s" not in figures.content:
            figures.put(copy_s=latencies(copy_times(one.pusher.num_bytes, directory)), push_bytes=one.pusher.num_bytes)
        for place, load in enumerate(("", *plan.loads)):
            await self.load(load)
            say(f"{len(plan.loads) - place} loads to go")
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

    async def load(self, load: str) -> None:
        """All that is missing of it. Where constants are wanted its arms are measured together or not at all: each is
        held against the others of the same minutes."""
        arms = [cell for cell in cells(self._plan.arms, self._plan.loads) if cell.load == load]
        missing = [cell for cell in arms if not self._finished(cell)]
        if load and CONSTANT in self._plan.arms:
            if missing or not self._constants(load):
                await self._beside_constants(load, arms)
        else:
            found = Taken()
            for turn in range(max((len(self._turns(cell)) for cell in missing), default=0)):
                await self._take(_ordered(missing, turn), turn, found)
            self._keep(found)

    async def _beside_constants(self, load: str, arms: Sequence[Cell]) -> None:
        """Rounds in which users alone, the guard and constants around its seats take turns, and rounds of the best of
        them; what the call before had of the load is measured anew."""
        self._figures.drop(load)
        last = [cell for cell in arms if cell.arm == UNGUARDED]
        first, found = [cell for cell in arms if cell not in last], Taken()
        await self._take(first, 0, found)
        constants = self._grid(load, found)
        await self._take([*constants, *last], 0, found)
        for turn in range(1, rounds_of(load, self._plan)):
            if turn == sweep_rounds_of(load, self._plan):
                self._keep(found)
                constants = self._finalists(load)
            await self._take(_ordered([*first, *constants, *last], turn), turn, found)
        self._keep(found)
        say(f"{self._oracle(load)['seats']} seats are the best constant at {load}")

    def _grid(self, load: str, found: Taken) -> list[Cell]:
        guarded = [held(seen, seen.start, seen.stop) for seen in found.get(Cell(GUARD, load), [])]
        seats = None if not guarded or guarded[0] is None else guarded[0] / self._plan.replicas
        return [Cell(CONSTANT, load, each) for each in grid(seats, self._plan.seats)]

    def _finalists(self, load: str) -> list[Cell]:
        oracle = self._oracle(load)
        keeps = {int(seats): bool(one["keeps"]) for seats, one in oracle["constants"].items()}
        return [Cell(CONSTANT, load, seats) for seats in finalists(oracle["seats"], keeps, self._plan.seats)]

    def _oracle(self, load: str) -> dict[str, Any]:
        found: dict[str, Any] = self._figures.content["comparison"][load]["oracle"]
        return found

    def _constants(self, load: str) -> list[str]:
        return [key for key, one in self._figures.cells.items() if (one["arm"], one["load"]) == (CONSTANT, load)]

    def _finished(self, cell: Cell) -> bool:
        """In this call or before."""
        found = self._figures.cells.get(cell.key)
        return found is not None and len(found["by_round"]) >= len(self._turns(cell))

    def _found_rate(self, load: str) -> float:
        """The capacity, users a second; 0 for what has no load and may come before it is found."""
        return float(self._figures.content["capacity"]["rate"]) if load else 0.0

    def _turns(self, cell: Cell) -> range:
        return turns_of(cell, self._plan, load_rate(cell.load, self._found_rate(cell.load), self._plan))

    async def _take(self, row: Iterable[Cell], turn: int, found: Taken) -> None:
        """One round of each that has it, added to `found`."""
        for cell in row:
            if turn not in (turns := self._turns(cell)):
                continue
            place = f"{cell.key}, round {turn + 1} of {len(turns)}" if len(turns) > 1 else cell.key
            async with _progress(self._one, place):
                seen = await self._one.cell(cell, self._slo, self._found_rate(cell.load), turn=turn)
            found.setdefault(cell, []).append(seen)
        self._figures.put(repeated=self._one.quiet.repeated, waited_s=self._one.quiet.waited_s)

    def _keep(self, found: Taken) -> None:
        """The figures of all rounds so far."""
        for rounds in found.values():
            self._put(rounds)
        if found:
            say(f"\n{table({cell.key: self._figures.cells[cell.key] for cell in found})}")
        for cell in found:
            if cell.arm == USERS and (inside := self._figures.cells[cell.key]["attainment"]) < TARGET:
                say(f"{cell.key}: {inside:.1%} inside the SLO: the machine is slower than when its capacity was found")

    def _put(self, rounds: Sequence[Seen]) -> None:
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


def rounds_of(load: str, plan: Plan) -> int:
    """In which its arms take turns."""
    return plan.day_rounds if load == DAY else plan.rounds


def sweep_rounds_of(load: str, plan: Plan) -> int:
    """The first of them, in which constants around the guard's seats take turns too."""
    return plan.day_sweep_rounds if load == DAY else plan.sweep_rounds


def turns_of(cell: Cell, plan: Plan, rate: float) -> range:
    """Which of a load's rounds, to which users come at `rate`, it has at most: the damage without the guard is seen of
    the fewest users that an arm may have.

    >>> plan = Plan()
    >>> [turns_of(cell, plan, 5.0) for cell in (Cell(USERS, "50"), Cell(CONSTANT, DAY, 8), Cell(ARRIVAL))]
    [range(0, 4), range(0, 2), range(0, 1)]
    >>> [len(turns_of(Cell(UNGUARDED, "50"), plan, rate)) for rate in (1.0, 3.0, 5.0, 10.0)]
    [4, 3, 2, 1]
    """
    if not cell.load:
        return range(1)
    if cell.arm == UNGUARDED:
        return range(1 if cell.load == DAY else math.ceil(plan.users * plan.rounds / users_of(plan, rate)))
    return range(rounds_of(cell.load, plan))


def _ordered(row: Sequence[Cell], turn: int) -> Iterable[Cell]:
    """Every second time backwards, by which what drifts steadily is the same for all."""
    return reversed(row) if turn % 2 else row


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
