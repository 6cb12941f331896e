"""What the co-serving bench hears of the replica while a cell runs."""

import asyncio
from typing import Any

import pytest

from rollout.board import SETTINGS_REFUSED, Heartbeat, ReplicaState
from rollout.local_board import LocalBoard
from tests.bench.coserve.beats import Beat, Watch, harvest_rate


async def _tell(board: LocalBoard, *, sent_at: float, tokens: int = 0, name: str = "replica", **more: Any) -> None:
    beat = Heartbeat(
        *(name, "host", 1, ReplicaState.HEALTHY, "policy", 3, 32, 1, 4, tokens, 0, None), sent_at=sent_at, **more
    )
    await board.heartbeat("fleet", beat, ttl_s=10.0)


async def test_tokens_between_the_last_heartbeat_and_the_end_are_waited_for() -> None:
    board = LocalBoard()
    await _tell(board, sent_at=100.0)
    watch = Watch(board, "fleet")
    await watch.after(99.0)
    waiting = asyncio.create_task(watch.after(105.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert harvest_rate(watch.beats, 100.0, 105.0) == 0.0
    await _tell(board, sent_at=106.0, tokens=600)
    await waiting
    assert harvest_rate(watch.beats, 100.0, 105.0) == pytest.approx(100.0)


async def test_a_replica_that_falls_silent_is_an_error() -> None:
    board = LocalBoard()
    await _tell(board, sent_at=105.0)
    with pytest.raises(RuntimeError, match=r"no heartbeat after 105.0 within 0.05 s, the newest: 105.0"):
        await Watch(board, "fleet").after(105.0, within_s=0.05)


async def test_settings_that_the_replica_refused_end_the_run() -> None:
    board = LocalBoard()
    watch = Watch(board, "fleet")
    refused = f"{SETTINGS_REFUSED}: slo.tpot_s=0.001 cannot be met"
    await _tell(board, sent_at=106.0, detail=refused)
    for wait in (watch.after(105.0), watch.run(), watch.heartbeats()):
        with pytest.raises(RuntimeError, match=r"refused the settings of this arm: .*slo\.tpot_s=0\.001"):
            await wait
    await _tell(board, sent_at=107.0, detail="version 3: canary gap 1, tolerance 0.05")
    await watch.after(105.0)


async def test_several_replicas_are_one_beat_that_says_what_their_guards_have_learned() -> None:
    board = LocalBoard()
    watch = Watch(board, "fleet", replicas=2)
    await _tell(board, sent_at=105.0, tokens=100, rollout_lost=10, seat_limit=20, slo_headroom=0.8)
    with pytest.raises(RuntimeError, match="wants 2 replicas, the board shows 1"):
        await watch.after(100.0)
    await _tell(board, sent_at=104.5, tokens=50, name="other", seat_limit=11, slo_headroom=0.6)
    await watch.after(104.0)
    assert watch.beats == [Beat(104.5, 140, 2, 8, limit=31, headroom=pytest.approx(0.7))]
    with pytest.raises(RuntimeError, match=r"no heartbeat after 104\.8"):  # of one of the two
        await watch.after(104.8, within_s=0.05)
