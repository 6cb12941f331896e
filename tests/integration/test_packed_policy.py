"""Packed rows give what padded rows give: logprobs, entropy, loss and gradients, on every architecture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, Qwen3Config

from rollout.errors import ConfigError
from tests.replay_kit import replay_config, write_recording
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy, build_tokenizer
from trainer import daemon
from trainer.algorithm import AlgorithmConfig
from trainer.batch import FloatArray, MicroBatch, Row, by_row, make_batch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.minibatch import plan
from trainer.models import load_policy
from trainer.objective import Sums, add_sums, forward_loss
from trainer.packed_attention import enable_packing
from trainer.partition import Packing
from trainer.policy import PolicyCore, PolicySpec, StepResult
from trainer.reference import ReferenceCore

CPU = torch.device("cpu")
CANARY = [(5, 6, 7, 8, 9, 10)]
FULL = AlgorithmConfig(
    loss="gspo",
    aggregation="sequence_mean",
    correction="tis_sequence",
    sequence_mask="geometric",
    sequence_mask_low=0.01,
    sequence_mask_high=100,
    entropy_coef=0.01,
    kl_coef=0.1,
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[Architecture, Path]:
    return {name: build_policy(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


def row(prompt: int, response: int, seed: int, *, turns: int = 1) -> Row:
    """With several turns every other stretch of the response is an environment's, and trains nothing."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 200, prompt + response).astype(np.int32)
    mask = (np.arange(response) * turns // response % 2 == 0).astype(np.float32)
    behavior, reference = (rng.normal(-5.5, 0.3, response).astype(np.float32) for _ in range(2))
    advantage, temperature = float(rng.normal()), float(rng.uniform(0.7, 1.3))
    return Row(ids[:prompt], ids[prompt:], behavior, mask, mask, advantage, temperature, reference)


CASES: dict[str, list[Row]] = {
    "one row": [row(5, 9, 0)],
    "one token": [row(1, 1, 0), row(3, 1, 1)],
    "like lengths": [row(4, 6, seed) for seed in range(5)],
    "wide lengths": [row(2 + 7 * seed % 11, 1 + 5 * seed % 40, seed) for seed in range(17)],
    "several turns": [row(3 + seed, 12 + 3 * seed, seed, turns=2 + seed % 4) for seed in range(7)],
}


def batches(rows: Sequence[Row], packing: Packing, *, budget: int = 96) -> list[MicroBatch]:
    return make_batch(rows, world_size=1, max_tokens=budget, aggregation="sequence_mean", packing=packing)[0]


def outcome(model: Any, rows: Sequence[Row], packing: Packing, algorithm: AlgorithmConfig) -> tuple[Sums, Any]:
    """Sums (loss and entropy among them) and gradients by name."""
    model.zero_grad()
    sums: Sums = {}
    for batch in batches(rows, packing):
        assert batch.packed is (packing == "on")
        loss, more = forward_loss(model, batch, algorithm, CPU)
        loss.backward()
        add_sums(sums, more)
    return sums, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), FULL], ids=["default", "full"])
def test_loss_entropy_and_gradients_are_those_of_padded_rows(
    directories: dict[Architecture, Path], architecture: Architecture, case: str, algorithm: AlgorithmConfig
) -> None:
    padded_model, model = (load_policy(directories[architecture], "float32") for _ in range(2))
    assert enable_packing(model, "on", CPU)
    padded, gradients = outcome(padded_model, CASES[case], "off", algorithm)
    packed, packed_gradients = outcome(model, CASES[case], "on", algorithm)
    tokens = padded["tokens"]
    assert {k: v / tokens for k, v in packed.items()} == pytest.approx(
        {k: v / tokens for k, v in padded.items()}, abs=1e-5
    )
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
    assert set(packed_gradients) == set(gradients)
    for name, gradient in gradients.items():
        assert (packed_gradients[name] - gradient).abs().max() < 1e-5, name
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def logprobs(core: Any, rows: Sequence[Row], packing: Packing) -> list[FloatArray]:
    share = batches(rows, packing)
    return by_row(rows, [share], [core.logprobs(share)])


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_policy_and_reference_score_packed_rows_as_padded_ones(
    directories: dict[Architecture, Path], architecture: Architecture
) -> None:
    path, rows = directories[architecture], [one for case in CASES.values() for one in case]
    plain = ReferenceCore(path, WorkersConfig(packing="off"))
    assert not plain.packs()
    expected = logprobs(plain, rows, "off")
    for core in (policy(path), ReferenceCore(path, WorkersConfig())):
        assert core.packs()
        for packing in ("on", "off"):
            for found, wanted in zip(logprobs(core, rows, packing), expected, strict=True):
                assert found == pytest.approx(wanted, abs=1e-5)


def policy(path: Path, **workers: Any) -> PolicyCore:
    settings = WorkersConfig.model_validate(workers)
    return PolicyCore(PolicySpec(path, settings, OptimizerConfig(lr=1e-3), AlgorithmConfig(), 0))


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    "workers",
    [{}, {"zero_stage": 2}, {"zero_stage": 3}, {"gradient_checkpointing": True}],
    ids=lambda workers: "-".join(workers) or "plain",
)
def test_packed_updates_take_the_steps_of_padded_ones(
    directories: dict[Architecture, Path], workers: dict[str, Any]
) -> None:
    rows = [replace(one, reference_logprobs_T=None) for one in CASES["wide lengths"]]
    found = {}
    for packing in ("off", "on"):
        core = policy(directories["qwen3_tied"], packing=packing, **workers)
        shares = plan(
            rows,
            AlgorithmConfig(minibatches=2),
            world_size=1,
            max_tokens=96,
            fixed_length=8,
            seed=0,
            step=1,
            packing=core._spec.workers.packing,
        )
        results = [core.update(shares[0], lr=1e-3) for _ in range(2)]
        assert all(result.applied for result in results)
        found[packing] = core.canary_logprobs(CANARY)[0]
    untrained = policy(directories["qwen3_tied"]).canary_logprobs(CANARY)[0]
    # Adam scales the smallest gradients up, so weights differ by more than gradients do.
    assert found["on"] == pytest.approx(found["off"], abs=1e-4)
    assert found["on"] != pytest.approx(untrained, abs=1e-2)


@pytest.mark.usefixtures("single_rank")
def test_an_exported_policy_names_no_attention_of_ours(directories: dict[Architecture, Path], tmp_path: Path) -> None:
    assert policy(directories["qwen3_tied"]).packs()
    policy(directories["qwen3_tied"]).export(tmp_path, bucket_bytes=1 << 28)
    assert "packed" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def tiny(kind: str, vocab_size: int = 32) -> Any:
    shape = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = {
        "sliding": lambda: Qwen3Config(
            **shape, **heads, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=16
        ),
        "mistral": lambda: MistralConfig(**shape, **heads, sliding_window=4),
        "eager": lambda: Qwen3Config(**shape, **heads, attn_implementation="eager", head_dim=16),
    }[kind]()
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("sliding", "layers of type sliding_attention"), ("mistral", "sliding window of 4"), ("eager", "by itself")],
)
def test_a_model_that_cannot_be_packed_is_refused_under_on_and_left_alone_under_auto(kind: str, reason: str) -> None:
    model = tiny(kind)
    before = model.config._attn_implementation
    assert not enable_packing(model, "auto", CPU)
    with pytest.raises(ConfigError, match=f"workers.packing=on, but .*{reason}.*use workers.packing=auto or off"):
        enable_packing(model, "on", CPU)
    assert model.config._attn_implementation == before


def test_a_model_whose_rows_leak_is_found_out_by_trying() -> None:
    model = tiny("eager")
    model.set_attn_implementation("sdpa")
    mixer = model.model.layers[0].mlp

    def mixed(hidden: torch.Tensor, forward: Any = mixer.forward) -> torch.Tensor:
        return forward(hidden) + hidden.roll(1, 1)

    mixer.forward = mixed
    with pytest.raises(ConfigError, match="lets packed rows see each other"):
        enable_packing(model, "on", CPU)


def test_learned_positions_restart_too() -> None:
    torch.manual_seed(0)
    size = len(build_tokenizer())
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    assert enable_packing(model, "on", CPU)


def test_off_leaves_the_attention_as_it_is(directories: dict[Architecture, Path]) -> None:
    model = load_policy(directories["qwen3_tied"], "float32")
    assert not enable_packing(model, "off", CPU)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("sliding", [False, True])
async def test_a_run_packs_where_its_model_can_and_pads_where_it_cannot(
    tmp_path: Path, sliding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_policy(tmp_path / "policy", "qwen3_tied")
    if sliding:
        tiny("sliding", vocab_size=len(build_tokenizer())).save_pretrained(path)
    seen: list[bool] = []

    def spied(self: PolicyCore, batches: Sequence[MicroBatch], **kwargs: Any) -> StepResult:
        seen.extend(batch.packed for batch in batches)
        return plain(self, batches, **kwargs)

    plain = PolicyCore.update
    monkeypatch.setattr(PolicyCore, "update", spied)
    recording = write_recording(tmp_path / "source.rec")
    replay = replay_config(tmp_path, path, "run", recording, steps=2, workers={"max_tokens_per_micro_batch": 4096})
    assert await daemon._replay(replay, recording) == 0
    assert set(seen) == {not sliding}
