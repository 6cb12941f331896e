"""Users have the base model and rollouts the adapter in training when one of two replicas is killed in the middle of a
push: users of the other notice nothing, what was salvaged goes on there, and the new adapter arrives.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout.client import RolloutClient
from rollout.types import Segment
from rollout.weights import version_dir
from tests.fake_trainer import FakeTrainer, peft_logprobs
from tests.fault_rows import FaultRow
from tests.fleet_users import LONGEST, Readers, count, failed, users
from tests.killed_replicas import (
    AdapterKiller,
    delivered,
    handed_in,
    healthy,
    next_heartbeats,
    segments,
    trainer,
    versions,
)
from tests.running_fleet import run_fleet

pytestmark = pytest.mark.timeout(1500)

_GROUPS = 60
_LENGTHS = (200, 160, 240, 120, 280)
"""Most tokens of the samples of one group after another: were they alike, all groups of a replica would begin in one
moment, and one that is killed in it would have nothing to salvage."""
_UNDER_WAY = 500
"""Tokens that the victim has generated before its death, so that some of them are salvaged."""
_NOISE = 0.3
"""Of the adapters: enough for one to be told from another by logprobs."""
_CHECKED = 10
"""Of the samples of groups that the victim had."""
_ADAPTERS = """
[fleet.sharing]
mode = "adapter"
max_lora_rank = 8
"""


@pytest.mark.fault("kill -9 of a replica in a push of an adapter", "P6")
async def test_samples_of_a_killed_replica_go_on_with_their_adapters_logprobs_and_users_stay_on_the_base(
    tmp_path: Path, fault: FaultRow
) -> None:
    with (
        run_fleet(tmp_path, min_replicas=2, answers=LONGEST, more=_ADAPTERS) as fleet,
        RolloutClient(fleet.url, fleet.tokens.rollout) as client,
    ):
        model = fleet.config.model.name
        async with trainer(fleet, tmp_path / "weights", AdapterKiller) as pusher:
            await pusher.push(await pusher.publish(noise=_NOISE), replicas=2)
            both = await healthy(pusher, lambda beat: beat.version == 1, count=2)
            victim, other = sorted(both, key=lambda beat: beat.replica)
            readers = Readers(fleet, model, pusher.board)
            await readers.begin([victim.replica, other.replica])
            rollouts = [
                client.submit([f"a{number}"], n=4, sampling={"max_tokens": _LENGTHS[number % len(_LENGTHS)]})
                for number in range(_GROUPS)
            ]
            await pusher.beat_where(lambda b: b.replica == victim.replica and b.rollout_tokens > _UNDER_WAY)
            with users(fleet, model, since=pusher.death.known) as asking:
                await pusher.interrupted_push(victim, replicas=2, noise=_NOISE)
                await healthy(pusher, lambda beat: beat.replica == other.replica and beat.version == 2)
                known = {victim.replica, other.replica}
                with fault.recovery():
                    await healthy(pusher, lambda beat: beat.replica not in known and beat.version == 2)
                groups = [status for rollout in rollouts for status in await delivered(fleet, client, rollout)]
                later = await delivered(fleet, client, client.submit(["later"], n=4, sampling={"max_tokens": 20}))
            await readers.check_lost(victim.replica, died=pusher.death.at)
            assert failed(asking) == []
            assert count(asking) > 50
            assert len({text for user in asking for text in user.texts}) == 1, "of the base alone"

            assert all(versions(segment, {1, 2}) for segment in segments(groups))
            assert {tuple(versions(segment, {2})) for segment in segments(later)} == {(2,)}
            await next_heartbeats(pusher.board, fleet.config.fleet, besides=victim.replica)
            alive = await healthy(pusher, lambda beat: beat.replica != victim.replica, count=2)
            ended_here = handed_in([*groups, *later], {beat.replica for beat in alive})
            assert ended_here > sum(beat.rollout_tokens for beat in alive), "some tokens are the victim's"
            check_logprobs(pusher, segments(status for status in groups if status.attempt > 1)[:_CHECKED])


def check_logprobs(pusher: FakeTrainer, those: Sequence[Segment]) -> None:
    """Every token has the logprob that PEFT computes under the version which the sample says made it."""
    assert those
    models = {version: adapted(pusher, version) for version in (1, 2)}
    for segment in those:
        ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
        for span in segment.version_spans:
            expected = peft_logprobs(models[span.version], (ids,))[0][len(segment.prompt_ids_P) - 1 :]
            found = segment.behavior_logprobs_T[span.start : span.stop]
            assert found == pytest.approx(expected[span.start : span.stop], abs=2e-3)


def adapted(pusher: FakeTrainer, version: int) -> Any:
    base = AutoModelForCausalLM.from_pretrained(pusher.model)
    return PeftModel.from_pretrained(base, version_dir(pusher.weights, version))
