"""After its engine was silent a replica harvests only once the weights in use have passed their check again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.reconcile_stand import Stand


async def applied(tmp_path: Path) -> Stand:
    stand = Stand(tmp_path)
    stand.publish(1)
    for _ in range(2):
        await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit, stand.engine.loads) == (1, True, 1)
    return stand


async def settled(stand: Stand) -> bool:
    """Whether work may be handed in now."""
    try:
        async with asyncio.timeout(0.02):
            await stand.reconciler.settled()
    except TimeoutError:
        return False
    return True


async def test_weights_that_are_right_still_are_checked_and_not_loaded_again(tmp_path: Path) -> None:
    stand = await applied(tmp_path)
    stand.reconciler.doubt()
    assert (stand.reconciler.fit, stand.reconciler.unchecked, await settled(stand)) == (False, 1, False)
    await stand.reconciler.step()
    assert (stand.reconciler.fit, stand.reconciler.unchecked, await settled(stand)) == (True, None, True)
    assert (stand.engine.loads, stand.given_up) == (1, [])


async def test_weights_that_are_not_right_any_more_are_given_up_and_delivered_again(tmp_path: Path) -> None:
    stand = await applied(tmp_path)
    stand.engine.right = False
    stand.reconciler.doubt()
    await stand.reconciler.step()
    assert not stand.reconciler.fit
    assert "version 1, checked again: canary gap 8" in stand.given_up[0]
    stand.engine.right = True
    for _ in range(2):
        await stand.reconciler.step()
    assert stand.reconciler.fit
    assert stand.engine.loads >= 2
    assert await settled(stand)


async def test_an_engine_that_cannot_be_checked_loses_no_tokens_and_gets_the_version_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await applied(tmp_path)
    score, asked = stand.engine.score, 0

    async def refuse_once(token_ids: Sequence[int]) -> tuple[float, ...]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("no answer")
        return await score(token_ids)

    monkeypatch.setattr(stand.engine, "score", refuse_once)
    stand.reconciler.doubt()
    await stand.reconciler.step()
    await stand.reconciler.step()
    assert (stand.reconciler.fit, stand.engine.loads, stand.given_up) == (True, 2, [])


async def test_the_model_as_loaded_has_no_canary_and_is_not_doubted(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.board.run = None
    await stand.reconciler.step()
    stand.reconciler.doubt()
    assert (stand.reconciler.fit, await settled(stand)) == (True, True)


async def test_a_replica_that_is_called_back_is_in_no_doubt(tmp_path: Path) -> None:
    stand = await applied(tmp_path)
    stand.reconciler.doubt()
    await stand.reconciler.rest()
    assert await settled(stand)
    stand.reconciler.doubt()
    assert await settled(stand)


async def test_a_newer_version_that_passes_its_check_ends_the_doubt(tmp_path: Path) -> None:
    stand = await applied(tmp_path)
    stand.publish(2)
    step = asyncio.create_task(stand.reconciler.step())
    await asyncio.sleep(0)
    stand.reconciler.doubt()
    await step
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit, await settled(stand)) == (2, True, True)


async def test_a_version_that_is_being_checked_stays_the_one_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await applied(tmp_path)
    score, seen = stand.engine.score, list[int | None]()

    async def doubted(token_ids: Sequence[int]) -> tuple[float, ...]:
        stand.reconciler.doubt()
        seen.append(stand.reconciler.unchecked)
        return await score(token_ids)

    monkeypatch.setattr(stand.engine, "score", doubted)
    stand.publish(2)
    await stand.reconciler.step()
    assert set(seen) == {2}, "tokens of version 2 are kept from Redis until it has passed"
    assert (stand.reconciler.version, stand.reconciler.unchecked) == (2, None)


async def test_weights_that_failed_their_check_are_not_trusted_for_a_delivery_that_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the engine has what was in use beside the new one, and goes on with it."""
    stand = await applied(tmp_path)
    monkeypatch.setattr(stand.reconciler._swap, "conclude", lambda *, verified: True)
    stand.engine.right = False
    stand.reconciler.doubt()
    await stand.reconciler.step()
    assert stand.engine.loads == 2, "and was delivered once more"
    assert not stand.reconciler.fit
    assert "checked again" in stand.given_up[0]


async def test_a_new_version_that_fails_leaves_the_one_before_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await applied(tmp_path)
    monkeypatch.setattr(stand.reconciler._swap, "conclude", lambda *, verified: True)
    stand.publish(2)
    stand.engine.right = False
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit, stand.given_up) == (1, True, [])


async def test_weights_whose_checks_got_no_answer_are_gone_on_with_where_they_still_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await applied(tmp_path)
    monkeypatch.setattr(stand.reconciler._swap, "conclude", lambda *, verified: True)

    async def refuse(token_ids: Sequence[int]) -> tuple[float, ...]:
        raise RuntimeError("no answer")

    monkeypatch.setattr(stand.engine, "score", refuse)
    stand.reconciler.doubt()
    for _ in range(2):
        await stand.reconciler.step()
    assert (stand.reconciler.fit, stand.given_up, await settled(stand)) == (True, [], True)
