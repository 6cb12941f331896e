"""The trainer daemon against a real Redis and a simulated engine."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError, WriterBusy
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.audited import audited, contradictions
from tests.fault_rows import FaultRow
from tests.ports import free_port
from tests.replay_kit import replay_config, write_recording
from tests.simulated_engine import running, simulated
from tests.tiny_models import build_policy
from tests.trainer_kit import Daemon, metrics, steps_reached, train_config, write_prompts
from trainer import daemon as daemon_module
from trainer.checkpoint import CheckpointStore, TrainerState
from trainer.run_lock import run_lock


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


async def test_a_run_learns_and_leaves_a_complete_account(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    config = train_config(
        tmp_path,
        redis_store.config,
        "learns",
        model_dir,
        ray_address=ray_address,
        steps=12,
        batch_groups=8,
        prompts={
            "train": write_prompts(tmp_path / "train.jsonl"),
            "eval": write_prompts(tmp_path / "eval.jsonl", 8, offset=500),
        },
    )
    daemon = Daemon(config, tmp_path)
    try:
        async with running(simulated(redis_store, config)) as engine:
            assert await daemon.exit_code() == 0, daemon.output
    finally:
        daemon.end()
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["reward_after"]["sampled"] > summary["reward_before"]["sampled"] + 0.1
    assert summary["groups_trained"] == 96
    assert len(summary["pushes"]) == 13
    assert max(engine.canary_gaps) < 1e-4
    assert all(not push["missing"] for push in summary["pushes"])
    queue = await audited(config.run_dir, redis_store)
    assert (await queue.ledger()).trained == 96
    assert await RedisBoard(redis_store).attached_run(config.fleet) is None
    engine_gaps = [line["engine_gap"] for line in metrics(config.run_dir) if "engine_gap" in line]
    assert max(engine_gaps) < 1e-4
    newest = max((config.run_dir / "checkpoints").glob("step-*"))
    model = AutoModelForCausalLM.from_pretrained(newest / "policy")
    assert all(torch.isfinite(p).all() for p in model.parameters())


async def test_evaluations_while_training_goes_on_are_of_one_version_each(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    config = train_config(
        tmp_path,
        redis_store.config,
        "held-out",
        model_dir,
        ray_address=ray_address,
        steps=12,
        evaluation={"every": 3, "n": 8},
        prompts={
            "train": write_prompts(tmp_path / "train.jsonl"),
            "eval": write_prompts(tmp_path / "eval.jsonl", 40, offset=500),
        },
    )
    daemon = Daemon(config, tmp_path)
    try:
        async with running(simulated(redis_store, config)), running(simulated(redis_store, config)):
            assert await daemon.exit_code() == 0, daemon.output
    finally:
        daemon.end()
    evaluations = json.loads((config.run_dir / "summary.json").read_text())["evaluations"]
    during = [one for one in evaluations if one["label"].startswith("step-")]
    assert during
    assert all(one["versions"] == [one["step"] + 1] * 2 and one["failed_groups"] == 0 for one in during)
    assert await RedisBoard(redis_store).pinned(config.fleet) is None
    await audited(config.run_dir, redis_store)


@pytest.mark.fault("kill -9 of a live trainer", "P2")
async def test_a_killed_run_resumes_without_reusing_a_version_or_a_group(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str, fault: FaultRow
) -> None:
    config = train_config(
        tmp_path,
        redis_store.config,
        "killed",
        model_dir,
        steps=9,
        ray_address=ray_address,
        checkpoint={"every": 4, "keep": 1},  # the second session outlives the checkpoint it resumed from
    )
    async with running(simulated(redis_store, config)) as engine:
        first = Daemon(config, tmp_path)
        try:
            await steps_reached(config.run_dir, 6, first)
            first.send(signal.SIGKILL)
            assert await first.exit_code() == -signal.SIGKILL
        finally:
            first.end()
        journal = [json.loads(line) for line in (config.run_dir / "journal.jsonl").read_text().splitlines()]
        second = Daemon(config, tmp_path)
        try:
            with fault.recovery():
                await steps_reached(config.run_dir, 7, second)
            assert await second.exit_code() == 0, second.output
        finally:
            second.end()
    after = [json.loads(line) for line in (config.run_dir / "journal.jsonl").read_text().splitlines()]
    assert after[: len(journal)] == journal
    assert [entry["step"] for entry in after] == list(range(1, 10))
    ids = [group for entry in after for group in entry["group_ids"]]
    assert len(ids) == len(set(ids)) == 36
    assert engine.versions_seen == sorted(set(engine.versions_seen))
    queue = await audited(config.run_dir, redis_store)
    assert (await queue.ledger()).trained == 36
    repeated = [line["step"] for line in metrics(config.run_dir)]
    assert repeated.count(5) == 2
    assert json.loads((config.run_dir / "summary.json").read_text())["groups_trained"] == 36


async def test_a_replay_of_two_ranks_runs_as_ray_actors_and_needs_no_redis(
    tmp_path: Path, model_dir: Path, ray_address: str
) -> None:
    config = replay_config(
        tmp_path,
        model_dir,
        "ranks",
        write_recording(tmp_path / "source.rec"),
        ray_address=ray_address,
        workers={"cpus": 0.1, "world_size": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 64},
    )
    daemon = Daemon(config, tmp_path)
    try:
        assert await daemon.exit_code() == 0, daemon.output
    finally:
        daemon.end()
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["step"], summary["groups_trained"], summary["skipped_steps"]) == (7, 21, 0)


@pytest.mark.fault("damaged newest checkpoint", "P2", destroys=True)
async def test_a_run_whose_newest_checkpoint_is_damaged_trains_its_lost_steps_anew(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str, fault: FaultRow
) -> None:
    config = train_config(
        tmp_path, redis_store.config, "damaged", model_dir, steps=4, ray_address=ray_address, checkpoint={"every": 2}
    )
    async with running(simulated(redis_store, config)):
        for steps in (4, 5):
            daemon = Daemon(config.model_copy(update={"steps": steps}), tmp_path)
            try:
                assert await daemon.exit_code() == 0, daemon.output
            finally:
                daemon.end()
            if steps == 4:
                (config.run_dir / "checkpoints" / "step-00000004" / "optimizer.safetensors").write_bytes(b"?")
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["step"], summary["lost_steps"], summary["groups_trained"]) == (5, 2, 20)
    lines = metrics(config.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4, 5]
    assert all(line["applied"] for line in lines)
    assert (await RedisQueue(redis_store, config.run).ledger()).trained == 28
    fault.fired, fault.lost = True, 8
    fault.named = await contradictions(config.run_dir, redis_store)
    assert len(fault.named) == 8, "the groups that the damaged checkpoint had settled, and nothing else"
    assert all(line.startswith("P2: ") and "ended as trained, and no step" in line for line in fault.named)


@pytest.mark.fault("SIGTERM of the trainer", "P10")
async def test_sigterm_checkpoints_settles_and_exits_zero(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, fault: FaultRow
) -> None:
    config = train_config(tmp_path, redis_store.config, "stopped", model_dir, steps=500, checkpoint={"every": 100})
    async with running(simulated(redis_store, config)):
        daemon = Daemon(config, tmp_path)
        try:
            await steps_reached(config.run_dir, 2, daemon)
            with fault.recovery():
                daemon.send(signal.SIGTERM)
                assert await daemon.exit_code() == 0, daemon.output
        finally:
            daemon.end()
    assert "SIGTERM received" not in daemon.output, "Ray's handler, which aborts whoever stops for more than 3 s"
    done = metrics(config.run_dir)[-1]["step"]
    assert (config.run_dir / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    queue = await audited(config.run_dir, redis_store)
    assert (await queue.ledger()).trained == done * config.batch_groups
    token = await queue.acquire_writer("someone else", ttl_s=5)
    await queue.release_writer(token)


async def test_sigterm_while_the_workers_load_exits_zero_and_lets_go(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    """The workers never find room, so the daemon stays at loading them."""
    workers = {"cpus": 64, "start_timeout_s": 600}
    config = train_config(tmp_path, redis_store.config, "loading", model_dir, ray_address=ray_address, workers=workers)
    daemon = Daemon(config, tmp_path)
    try:
        while await RedisBoard(redis_store).attached_run(config.fleet) != config.run:
            assert daemon.alive, daemon.output
            await asyncio.sleep(0.05)
        daemon.send(signal.SIGTERM)
        assert await daemon.exit_code(30) == 0, daemon.output
    finally:
        daemon.end()
    queue = RedisQueue(redis_store, config.run)
    await queue.release_writer(await queue.acquire_writer("someone else", ttl_s=5))


async def test_sigterm_while_ray_starts_exits_zero(tmp_path: Path, redis_store: RedisStore, model_dir: Path) -> None:
    config = train_config(tmp_path, redis_store.config, "starting", model_dir)
    daemon = Daemon(config, tmp_path)
    try:
        while not daemon.starts("gcs_server"):
            assert daemon.alive, daemon.output
            await asyncio.sleep(0.01)
        daemon.send(signal.SIGTERM)
        assert await daemon.exit_code(60) == 0, daemon.output
    finally:
        daemon.end()


async def test_a_checkpoint_that_an_earlier_trainer_wrote_while_this_one_waited_is_resumed(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config(tmp_path, redis_store.config, "waited", model_dir, writer_ttl_s=20.0)
    resumed: list[int] = []

    async def train(
        _stack: object, _config: object, _claim: object, inputs: daemon_module.Inputs, *_: object, **__: object
    ) -> None:
        resumed.append(inputs.checkpoint.state.step if inputs.checkpoint else 0)

    async def write(directory: Path) -> None:
        (directory / "policy" / "model.safetensors").write_bytes(b"weights")

    async def confirmed() -> None:
        pass

    monkeypatch.setattr(daemon_module, "joined_ray", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(daemon_module, "train", train)
    queue = RedisQueue(redis_store, config.run)
    token = await queue.acquire_writer("earlier", ttl_s=20)
    refused = asyncio.Event()
    monkeypatch.setattr(daemon_module.log, "info", lambda *_, **__: refused.set())
    checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=1)
    await checkpoints.save(TrainerState(2, 0, 2), write, confirmed)
    session = asyncio.create_task(daemon_module._session(config))
    await asyncio.wait_for(refused.wait(), 20)
    await checkpoints.save(TrainerState(4, 0, 4), write, confirmed)
    await queue.release_writer(token)
    assert await asyncio.wait_for(session, 20) == 0
    assert resumed == [4]


async def test_a_run_directory_in_use_by_a_trainer_of_another_redis_is_refused(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(*_: object, **__: object) -> None:
        raise AssertionError("two trainers in one directory")

    config = train_config(tmp_path, redis_store.config, "shared-dir", model_dir, writer_ttl_s=1.1)
    monkeypatch.setattr(daemon_module, "joined_ray", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(daemon_module, "train", train)
    config.run_dir.mkdir(parents=True)
    async with run_lock(config.run_dir, patience_s=1):
        with pytest.raises(ConfigError, match="another trainer on this machine uses it"):
            await asyncio.wait_for(daemon_module._session(config), 20)
    queue = RedisQueue(redis_store, config.run)
    await queue.release_writer(await queue.acquire_writer("someone else", ttl_s=5))


async def usurped(store: RedisStore, queue: RedisQueue) -> int:
    """The claim is taken over the way an operator would after a partition: by making it end early."""
    async with asyncio.timeout(10):
        while True:
            await store.command("HSET", f"{store.config.namespace}:{{{queue.run}}}:writer", "until", "0")
            with contextlib.suppress(WriterBusy):  # its trainer has renewed it in between
                return await queue.acquire_writer("usurper", ttl_s=60)


@pytest.mark.fault("a second trainer takes the run over", "P12")
async def test_a_fenced_trainer_stops_at_once(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str, fault: FaultRow
) -> None:
    config = train_config(tmp_path, redis_store.config, "fenced", model_dir, ray_address=ray_address, steps=500)
    async with running(simulated(redis_store, config)):
        daemon = Daemon(config, tmp_path)
        try:
            await steps_reached(config.run_dir, 1, daemon)
            queue = RedisQueue(redis_store, config.run)
            token = await usurped(redis_store, queue)
            with fault.recovery():
                assert await daemon.exit_code(30) == 3, daemon.output
            await queue.renew_writer(token, ttl_s=60)
        finally:
            daemon.end()


async def test_groups_that_are_too_old_are_dropped_as_stale(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    """The engine never takes a version: everything is sampled by version 0 and soon too old."""
    config = train_config(
        tmp_path,
        redis_store.config,
        "stale",
        model_dir,
        ray_address=ray_address,
        steps=50,
        push={"collective": False, "deadline_s": 0.5},
        staleness={"max_age": 2, "eta": 1},
    )
    async with running(simulated(redis_store, config, follow=False)):
        daemon = Daemon(config, tmp_path)
        try:
            await steps_reached(config.run_dir, 2, daemon)
            queue = RedisQueue(redis_store, config.run)
            while (await queue.ledger()).stale < 8:
                assert daemon.alive, daemon.output
            daemon.send(signal.SIGTERM)
            assert await daemon.exit_code() == 0, daemon.output
        finally:
            daemon.end()
    assert metrics(config.run_dir)[-1]["step"] == 2
    assert metrics(config.run_dir)[-1]["staleness_max"] == 2
    await audited(config.run_dir, redis_store)


async def test_two_ranks_with_a_reference_and_overlapped_evaluation(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    config = train_config(
        tmp_path,
        redis_store.config,
        "reference",
        model_dir,
        ray_address=ray_address,
        workers={"cpus": 0.1, "world_size": 2, "zero_stage": 1},
        algorithm={"kl_coef": 0.05},
        evaluation={"every": 2, "n": 2},
        health_port=free_port(),
        prompts={
            "train": write_prompts(tmp_path / "train.jsonl"),
            "eval": write_prompts(tmp_path / "eval.jsonl", 4, offset=500),
        },
    )
    async with running(simulated(redis_store, config)):
        daemon = Daemon(config, tmp_path)
        try:
            url = f"http://127.0.0.1:{config.health_port}"
            assert json.loads(await daemon.answer(f"{url}/status"))["phase"] == "starting"
            await steps_reached(config.run_dir, 1, daemon)
            assert json.loads(await daemon.answer(f"{url}/status"))["run"] == "reference"
            page = await daemon.answer(f"{url}/metrics")
            assert all(f"nightshift_trainer_{name} " in page for name in ("step", "step_age_seconds", "skipped_steps"))
            assert await daemon.exit_code() == 0, daemon.output
        finally:
            daemon.end()
    lines = metrics(config.run_dir)
    assert lines[0]["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["reference_kl"] > 0
    labels = [e["label"] for e in json.loads((config.run_dir / "summary.json").read_text())["evaluations"]]
    assert {"start", "step-2", "end"} <= set(labels)
    await audited(config.run_dir, redis_store)
