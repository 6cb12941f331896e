"""Reward functions run apart from the engine, within their time, and never score by accident."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from deploy.processes import Tree
from rollout.config import RewardEntry, RewardsConfig
from rollout.errors import ConfigError, RewardError
from rollout.rewards import RewardInput
from services.reward_pool import RewardPool
from tests.fault_rows import FaultRow

USER_MODULE = """
import os, sys, time

def length(sample):
    print("noise on stdout")
    return {"reward": len(sample.completion), "words": len(sample.completion.split())}

def hang(sample):
    time.sleep(60)

def offspring(sample):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with open(sample.params["note"], "w") as note:
        note.write(str(child.pid))
    if sample.params["end"]:
        os._exit(3)
    time.sleep(60)

def boom(sample):
    raise KeyError("no such thing")

def nan(sample):
    return float("nan")

def text(sample):
    return "high"

def die(sample):
    os._exit(3)

def leave(sample):
    sys.exit("enough")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def mute(sample):
    raise Mute

def forks(sample):
    return 7.0 if os.fork() == 0 else 1.0

def wordy(sample):
    return {"reward": 1.0, **{str(n): n for n in range(65)}}

async def patient(sample):
    import asyncio
    await asyncio.sleep(0)
    return {"reward": len(sample.completion), "note": "good", "odd": float("nan"), "kind": None}

def digits(sample):
    return sample.completion

def run(sample):
    import subprocess
    found = subprocess.run([sys.executable, "-c", sample.completion], capture_output=True)
    return float(b"EOFError" in found.stderr)

def reader(sample):
    import subprocess
    subprocess.Popen(["cat"], stdout=subprocess.DEVNULL)
    return 1

def huge(sample):
    return 10**400

def environment(sample):
    return {"reward": 0, **{name: 1 for name in os.environ}}

def hoard(sample):
    import mmap
    return float(len(mmap.mmap(-1, 3 << 30)) == 3 << 30)

def heavy(sample):
    return sum(m in sys.modules for m in ("torch", "vllm", "ray"))
"""
FUNCTIONS = (
    "length", "hang", "offspring", "boom", "nan", "text", "patient", "digits", "run", "reader", "huge", "die", "heavy",
    "leave", "mute", "forks", "wordy", "environment",
)  # fmt: skip


def sample(completion: str = "ab cd", **changes: object) -> RewardInput:
    fields = {
        "prompt": "p",
        "completion": completion,
        "finish_reason": "stop",
        "metadata": {"answer": "ab cd"},
        "params": {},
        "response_ids": (1, 2),
    }
    return RewardInput(**{**fields, **changes})


def ended(pid: int) -> bool:
    """Whether a process runs no more, be it reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[RewardPool]:
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    entries = {f: RewardEntry(function=f"my_rewards:{f}", timeout_s=1.0) for f in FUNCTIONS}
    pool = RewardPool(RewardsConfig(functions=entries, python_path=[tmp_path]))
    yield pool
    await pool.close()


async def test_a_users_function_scores_in_order_and_keeps_its_breakdown(pool: RewardPool) -> None:
    rewards = await pool.score("length", [sample("a"), sample("b c d")])
    assert [r.value for r in rewards] == [1.0, 5.0]
    assert rewards[1].breakdown == {"words": 3.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("boom", "KeyError"),
        ("nan", "not finite"),
        ("text", "not a number"),
        ("digits", "reward is str, not a number"),
        ("huge", "not finite"),
        ("die", "process ended"),
        ("leave", "SystemExit: enough"),
        ("mute", "Mute"),
        ("wordy", "66 keys, at most 64"),
        ("missing", "not configured"),
    ],
)
async def test_a_failing_function_is_an_error_and_the_pool_goes_on(pool: RewardPool, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        await pool.score(name, [sample("1.0")])
    assert (await pool.score("length", [sample("abc")]))[0].value == 3.0


async def test_the_child_of_a_function_that_forks_answers_nothing(pool: RewardPool) -> None:
    for _ in range(3):
        assert [r.value for r in await pool.score("forks", [sample(), sample()])] == [1.0, 1.0]
    assert (await pool.score("length", [sample("abc")]))[0].value == 3.0


async def test_an_async_function_scores_and_what_is_no_number_of_its_breakdown_is_left_out(pool: RewardPool) -> None:
    (reward,) = await pool.score("patient", [sample("abc")])
    assert (reward.value, reward.breakdown) == (3.0, {})


async def test_what_a_function_starts_reads_an_empty_input_and_not_the_pools_jobs(pool: RewardPool) -> None:
    assert (await pool.score("run", [sample("input()")]))[0].value == 1.0
    for _ in range(4):
        assert [r.value for r in await pool.score("reader", [sample(), sample()])] == [1.0, 1.0]


def children() -> set[int]:
    """Of this process, which has a fleet too where other tests need one."""
    return {process.pid for process in psutil.Process().children()}


async def test_a_hanging_function_is_killed_at_its_limit(pool: RewardPool) -> None:
    others = children()
    await pool.score("length", [sample()])
    workers = children() - others
    assert workers
    with pytest.raises(RewardError, match=r"timeout_s=1\.0"):
        await pool.score("hang", [sample()])
    assert not workers & children()


@pytest.mark.parametrize("end", [False, True], ids=["the function hangs", "its process ends"])
async def test_what_a_failing_function_started_ends_with_it(pool: RewardPool, tmp_path: Path, *, end: bool) -> None:
    note = tmp_path / "child"
    with pytest.raises(RewardError):
        await pool.score("offspring", [sample(params={"note": str(note), "end": end})])
    child = int(note.read_text())
    async with asyncio.timeout(5):
        while not ended(child):  # noqa: ASYNC110  state of another process
            await asyncio.sleep(0.01)


async def test_functions_see_the_environment_that_they_need_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = (
        "NIGHTSHIFT_ADMIN_TOKEN",
        "NIGHTSHIFT_REDIS__URL",
        "REDIS_URL",
        "RAY_AUTH_TOKEN",
        "RAY_ADDRESS",
        "HF_TOKEN",
    )
    needed = ("PATH", "LC_ALL", "TMPDIR", "JUDGE_KEY")
    for name in (*secrets, *needed, "OTHER_KEY"):
        monkeypatch.setenv(name, os.environ["PATH"] if name == "PATH" else str(tmp_path))
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    entries = {"mine": RewardEntry(function="my_rewards:environment")}
    tree = Tree()
    tree.mark()
    pool = RewardPool(RewardsConfig(functions=entries, python_path=[tmp_path], environment=("JUDGE_KEY",)))
    try:
        (reward,) = await pool.score("mine", [sample()])
    finally:
        tree.unmark()
        await pool.close()
    seen = set(reward.breakdown)
    assert seen >= {*needed, "PYTHONPATH", "OMP_NUM_THREADS", tree.name}, "the mark by which a fleet ends its processes"
    assert not seen & {*secrets, "OTHER_KEY"}
    assert {name for name in seen if name.startswith(("NIGHTSHIFT_", "RAY_"))} == {tree.name}


@pytest.mark.parametrize("name", ["NIGHTSHIFT_USER_TOKEN", "REDIS_URL", "RAY_ADDRESS"])
def test_a_secret_of_the_fleet_is_given_to_no_function(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"rewards\.environment names {name}"):
        RewardsConfig(environment=("PATH", name))


async def test_functions_see_no_engine_modules(pool: RewardPool) -> None:
    assert (await pool.score("heavy", [sample()]))[0].value == 0.0


async def test_a_function_that_cannot_be_imported_is_a_config_error_at_start(tmp_path: Path) -> None:
    pool = RewardPool(RewardsConfig(functions={"mine": RewardEntry(function="nowhere:f")}))
    with pytest.raises(ConfigError, match=r"rewards\.functions\.mine.*nowhere"):
        await pool.check()
    await pool.close()


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        ("exact_match", {}, 1.0),
        ("exact_match", {"completion": " ab cd \n"}, 1.0),
        ("exact_match", {"completion": "AB CD"}, 0.0),
        ("exact_match", {"completion": "AB CD", "params": {"ignore_case": True}}, 1.0),
        ("exact_match", {"finish_reason": "length"}, 1.0),
        ("exact_match", {"finish_reason": "length", "params": {"require_stop": True}}, 0.0),
        ("contains", {"params": {"text": "b c"}}, 1.0),
        ("contains", {"params": {"text": "zz"}}, 0.0),
        ("math_verify", {"completion": "$\\frac{1}{2}$", "metadata": {"answer": "0.5"}}, 1.0),
        ("math_verify", {"completion": "no idea", "metadata": {"answer": "0.5"}}, 0.0),
        (
            "reasoning_gym",
            {"completion": "cba", "metadata": {"answer": "cba"}, "params": {"dataset": "spell_backward"}},
            1.0,
        ),
        (
            "reasoning_gym",
            {
                "completion": "cbx",
                "metadata": {"answer": "cba"},
                "params": {"dataset": "spell_backward", "threshold": 0.999},
            },
            0.0,
        ),
    ],
)
async def test_built_in_rewards(pool: RewardPool, name: str, change: dict[str, object], value: float) -> None:
    assert (await pool.score(name, [sample(**change)]))[0].value == value


GREEDY = """
import json, sys
import reasoning_gym
from services import reward_worker
reward_worker._ROOM_BYTES = 1 << 26
for job in json.loads(sys.argv[1]):
    print(json.dumps(list(reward_worker.answer(json.dumps(job)))))
"""


@pytest.mark.fault("a reward that asks for more memory than there is", "P9")
def test_an_entry_that_asks_for_more_memory_than_there_is_to_a_built_in_reward_fails_alone(
    tmp_path: Path, fault: FaultRow
) -> None:
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    sizes = {"num_disks": 10**12, "num_pegs": 3, "start_peg": 1, "target_peg": 3}
    entry = {"question": "q", "answer": "a", "metadata": sizes}
    hanoi = sample(metadata={"entry": entry}, params={"dataset": "tower_of_hanoi"})
    built_in, own = "rollout.rewards:reasoning_gym", "my_rewards:hoard"
    jobs = [{"function": function, "samples": [asdict(hanoi)]} for function in (built_in, own, built_in)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    command = [sys.executable, "-c", GREEDY, json.dumps(jobs)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert first == third == [{"loaded": built_in}, {"error": "MemoryError: "}]
    fault.fired = True
    assert second == [{"loaded": own}, {"reward": 1.0, "breakdown": {}}], "an operator's function has no such limit"


@pytest.mark.parametrize("name", ["exact_match", "reasoning_gym"])
async def test_a_missing_answer_is_an_error_not_a_zero(pool: RewardPool, name: str) -> None:
    with pytest.raises(RewardError, match="answer"):
        await pool.score(name, [sample(metadata={}, params={"dataset": "spell_backward"})])
