"""How often workers are started again, and what is shown of one that died."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig, WorkersConfig
from trainer.daemon import _restarting
from trainer.errors import WorkerDied, WorkerLost
from trainer.placement import bundle_of
from trainer.restarts import Restarts
from trainer.worker_log import WorkerLog, tail

BASE = {"model": {"path": "m"}, "prompts": {"train": "p.jsonl"}, "reward": {"name": "r"}}
PPO = {
    **BASE,
    "algorithm": {"advantage": "gae", "kl_coef": 0.1},
    "critic": {},
    "reward_model": {"path": "rm", "workers": {"world_size": 2, "cpus": 2}},
}


def test_losses_without_a_checkpoint_between_them_are_counted() -> None:
    restarts = Restarts(2)
    assert [restarts.allow(step) for step in (0, 0, 0)] == [True, True, False]


def test_a_checkpoint_begins_a_new_row() -> None:
    restarts = Restarts(1)
    assert [restarts.allow(step) for step in (0, 10, 20, 20)] == [True, True, True, False]


def test_a_limit_of_zero_allows_none() -> None:
    assert not Restarts(0).allow(0)


def test_the_end_of_a_log_is_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("x" * 20_000 + "\n" + "".join(f"line {i}\n" for i in range(30)))
    assert tail(log) == [f"line {i}" for i in range(10, 30)]
    log.write_text("y" * 20_000)
    assert tail(log) == []


def test_a_log_elsewhere_is_named_with_its_machine(tmp_path: Path) -> None:
    path = tmp_path / "absent.err"
    assert WorkerLog("10.0.0.7", str(path)).end() == f"; its log is {path} on 10.0.0.7"
    assert WorkerLog("10.0.0.7", "").end() == ""
    path.write_text("")
    assert WorkerLog("10.0.0.7", str(path)).end() == ""
    path.write_text("Fatal Python error: Aborted\n")
    assert "Fatal Python error: Aborted" in WorkerLog("10.0.0.7", str(path)).end()


def test_ranks_of_a_colocation_share_a_device_and_add_up_their_cpus() -> None:
    cuda, cpu = WorkersConfig(device="cuda", cpus=1), WorkersConfig(cpus=0.5)
    assert bundle_of([cuda, cuda]) == {"CPU": 2.0, "GPU": 1.0}
    assert bundle_of([cpu, cpu]) == {"CPU": 1.0}
    assert bundle_of([WorkersConfig(cpus=0)]) == {"CPU": 0.001}


def test_groups_of_one_shape_may_be_colocated() -> None:
    config = TrainConfig.model_validate({**PPO, "colocations": {"trained": ["policy", "critic"]}})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    assert config.group_knobs == {
        "policy": "workers",
        "critic": "workers",
        "reference": "workers",
        "reward": "reward_model.workers",
    }


@pytest.mark.parametrize(
    ("colocations", "message"),
    [
        ({"frozen": ["reference"]}, "a colocation is of two groups or more"),
        ({"frozen": ["reference", "reward"]}, "world_size is 1 for reference and 2 for reward"),
        ({"a": ["policy", "critic"], "b": ["critic", "reference"]}, "critic is in colocations.a already"),
        ({"a": ["policy", "policy"]}, "policy is in colocations.a already"),
        ({"a": ["policy", "judge"]}, "Input should be 'policy', 'critic', 'reference' or 'reward'"),
    ],
)
def test_a_colocation_that_cannot_be_is_refused(colocations: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({**PPO, "colocations": colocations})


def test_a_colocation_of_a_group_that_is_not_started_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"colocations.frozen=\[reference, reward\]: this .* starts no reference group"
    ):
        TrainConfig.model_validate({**BASE, "colocations": {"frozen": ["reference", "reward"]}})


class Attempts:
    """Raises its errors one after the other, then ends."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def restarted(tmp_path: Path, attempts: Attempts, *, asked: bool = False, most: int = 2) -> None:
    config = TrainConfig.model_validate({**BASE, "max_restarts": most})
    signals = SimpleNamespace(asked=asked)
    await _restarting(attempts, config, CheckpointStore(tmp_path, keep=1), signals)  # type: ignore[arg-type]


async def test_workers_that_do_not_start_again_count_like_those_that_are_lost(tmp_path: Path) -> None:
    attempts = Attempts(WorkerLost("one"), WorkerDied("two"))
    await restarted(tmp_path, attempts)
    assert attempts.errors == []
    with pytest.raises(WorkerDied, match="three"):
        await restarted(tmp_path, Attempts(WorkerLost("one"), WorkerDied("two"), WorkerDied("three")))


async def test_workers_that_never_started_are_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="no room"):
        await restarted(tmp_path, Attempts(WorkerDied("no room")))


async def test_a_worker_that_dies_while_the_trainer_is_to_stop_is_a_stop(tmp_path: Path) -> None:
    attempts = Attempts(WorkerLost("one"), WorkerLost("two"))
    await restarted(tmp_path, attempts, asked=True)
    assert len(attempts.errors) == 1
