"""A fleet whose users keep their adapter while a run trains another one on the same engine, as a user starts both."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.weights import read_manifest
from tests.e2e.test_serve_and_train import TRAIN, records
from tests.plain_http import DIRECT
from tests.ports import free_port
from tests.running_fleet import TESTS, RunningFleet, run_configured, write_toml
from tests.tiny_models import build_policy

pytestmark = pytest.mark.timeout(1500)

PROMPT = "the quick brown fox"
STEPS = 3
SHARING = """
[fleet.sharing]
mode = "adapter"
max_lora_rank = 8
user_adapter = "{user}"
"""


def users_adapter(model: Path, directory: Path) -> str:
    """Written to the directory; returns what a user gets with it, greedily."""
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    answer = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFleet, str, Path]]:
    directory = tmp_path_factory.mktemp("adapter-fleet")
    model = build_policy(directory / "model")
    expected = users_adapter(model, directory / "user")
    toml = write_toml(directory, model=model, port=free_port(), max_replicas=1)
    toml.write_text(toml.read_text() + SHARING.format(user=directory / "user"))
    with run_configured(directory, toml) as fleet:
        yield fleet, expected, directory


def train(fleet: RunningFleet, directory: Path, lora: str) -> "subprocess.Popen[str]":
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("one two", "three", "four", "six")))
    toml = directory / "run.toml"
    settings = TRAIN.format(runs=directory / "runs", prompts=prompts, steps=STEPS, batch=4, every=3)
    toml.write_text(fleet.toml.read_text() + settings + lora)
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "train", "-c", str(toml)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=TESTS.parent,
        text=True,
    )


def ask(fleet: RunningFleet) -> str:
    with openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key=fleet.tokens.user, http_client=httpx.Client(**DIRECT), max_retries=0
    ) as client:
        answer = client.completions.create(model="policy", prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.model == "policy"
    return answer.choices[0].text


def test_a_run_whose_versions_the_fleet_cannot_load_ends_at_its_start(
    started: tuple[RunningFleet, str, Path],
) -> None:
    fleet, _, directory = started
    output, _ = train(fleet, directory, "").communicate(timeout=480)
    assert "train.lora is not set, but fleet fleet has sharing.mode=adapter" in output


def test_users_keep_their_adapter_while_rollouts_follow_the_one_that_trains(
    started: tuple[RunningFleet, str, Path],
) -> None:
    fleet, expected, directory = started
    answers = [ask(fleet)]
    trainer = train(fleet, directory, '\n[train.lora]\nr = 8\npublish = "adapter"\n')
    while trainer.poll() is None:
        answers.append(ask(fleet))
    output, _ = trainer.communicate()
    assert trainer.returncode == 0, output[-4000:]
    answers.append(ask(fleet))
    assert set(answers) == {expected}
    run = directory / "runs" / "default"
    newest = max((run / "weights").glob("v*"))
    manifest = read_manifest(newest)
    assert (manifest.form, manifest.version) == ("adapter", STEPS + 1)
    pushes = [push for record in records(run / "pushes.jsonl") for push in record["replicas"].values()]
    assert pushes
    assert all(push["verified"] and push["canary_gap"] < 5e-3 and push["pause_s"] < 1 for push in pushes)
