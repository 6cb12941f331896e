"""A reward model's scores are its classifier's, whatever is scored beside; what it cannot score is left out alone."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rollout.config import RedisConfig
from rollout.memory_queue import MemoryQueue
from rollout.types import Experience, Purpose
from tests.critic_kit import Rank, a_policy
from tests.queue_records import a_group, a_request
from tests.tiny_models import CHAT_TEMPLATE, build_classifier, build_policy
from tests.trainer_kit import train_config
from trainer.config import RewardModelConfig, WorkersConfig
from trainer.errors import ModelError
from trainer.intake import Intake, reject
from trainer.partition import deal
from trainer.reward_model import RewardCore, RewardModelSpec
from trainer.rewarding import model_scores, rewarded
from trainer.rows import FreshGroup
from trainer.step import update
from trainer.transcript import Transcriber, Transcript
from trainer.workers import Workers

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


@pytest.fixture(scope="module")
def decoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with the policy's tokenizer."""
    return build_classifier(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that reads letters, with a token of its own at both ends."""
    directory = tmp_path_factory.mktemp("encoder")
    letters = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", chat_template=CHAT_TEMPLATE).save_pretrained(
        directory
    )
    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64, num_labels=1,
        )
    ).save_pretrained(directory)  # fmt: skip
    return directory


def core(model_dir: Path, policy_dir: Path, *, budget: int = 64, **config: Any) -> RewardCore:
    settings = RewardModelConfig.model_validate({"path": model_dir, **config})
    return RewardCore(
        RewardModelSpec(model_dir, policy_dir, WorkersConfig(max_tokens_per_micro_batch=budget), settings)
    )


def transcripts(count: int = 7, *, end: int | None = None) -> list[Transcript]:
    rng = np.random.default_rng(3)
    made = [
        Transcript(*(rng.integers(5, 200, int(rng.integers(2, 9))).astype(np.int32) for _ in "pr"))
        for _ in range(count)
    ]
    for number, one in enumerate(made):
        if end is not None:
            one.response_ids_T[-1] = end + number
    return made


@pytest.mark.parametrize("pad", [0, None])
def test_a_score_is_that_of_the_sequence_alone(
    decoder_dir: Path, policy_dir: Path, tmp_path: Path, pad: int | None
) -> None:
    shutil.copytree(decoder_dir, tmp_path, dirs_exist_ok=True)
    model = AutoModelForSequenceClassification.from_pretrained(decoder_dir)
    model.config.pad_token_id = pad
    model.save_pretrained(tmp_path)
    made = transcripts(end=0 if pad is None else 7)
    found = core(tmp_path, policy_dir).scores(made)
    assert found.dtype == np.float32
    for one, score in zip(made, found, strict=True):
        ids = np.concatenate([one.prompt_ids_P, one.response_ids_T])
        with torch.no_grad():
            assert score == pytest.approx(float(model(torch.tensor(ids[None])).logits), abs=1e-5)


def test_what_the_model_cannot_read_scores_nan_and_the_others_as_ever(decoder_dir: Path, policy_dir: Path) -> None:
    reward = core(decoder_dir, policy_dir)
    good = Transcript(np.array([5, 6], np.int32), np.array([7, 8], np.int32))
    beyond = Transcript(np.array([5, 6], np.int32), np.array([10_000_000], np.int32))
    alone = reward.scores([good])
    found = reward.scores([beyond, good])
    assert math.isnan(found[0])
    assert found[1] == alone[0]


def test_bfloat16_scores_are_close_to_float32_ones(decoder_dir: Path, policy_dir: Path) -> None:
    exact, rounded = (core(decoder_dir, policy_dir, dtype=d).scores(transcripts()) for d in ("float32", "bfloat16"))
    # Scores have a scale of 4 (a head of deviation 0.5 over 64 hidden values of about 1); bfloat16 keeps 8 bits.
    assert rounded == pytest.approx(exact, abs=0.2)
    assert not np.array_equal(rounded, exact)


def test_another_tokenizer_reads_the_text_and_keeps_its_own_ends_when_cut(encoder_dir: Path, policy_dir: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(policy_dir)
    ids = [np.array(tokenizer(text).input_ids, np.int32) for text in ("one two ->", " owt eno<eos>")]
    own = PreTrainedTokenizerFast.from_pretrained(encoder_dir)
    read = Transcriber(policy_dir, encoder_dir, chat_template=False, max_length=None)(Transcript(*ids))
    assert read == own("one two -> owt eno").input_ids
    cut = Transcriber(policy_dir, encoder_dir, chat_template=False, max_length=8)(Transcript(*ids))
    assert cut == own("wt eno").input_ids
    chat = Transcriber(policy_dir, encoder_dir, chat_template=True, max_length=None)(Transcript(*ids))
    rendered = "<|user|>one two -><eos><|assistant|> owt eno<eos>"
    assert chat == own(rendered, add_special_tokens=False).input_ids
    scores = core(encoder_dir, policy_dir).scores([Transcript(*ids), *transcripts()])
    assert scores[0] == pytest.approx(core(encoder_dir, policy_dir).scores([Transcript(*ids)])[0], abs=1e-6)


def test_the_same_tokenizer_reads_the_tokens_that_were_sampled(decoder_dir: Path, policy_dir: Path) -> None:
    (one,) = transcripts(1)
    ids = [*one.prompt_ids_P.tolist(), *one.response_ids_T.tolist()]
    assert Transcriber(policy_dir, decoder_dir, chat_template=False, max_length=None)(one) == ids
    assert Transcriber(policy_dir, decoder_dir, chat_template=False, max_length=3)(one) == ids[-3:]


def test_a_model_that_gives_no_single_trained_number_is_refused(policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 1 weights, first score\.weight"):
        core(policy_dir, policy_dir)
    shutil.copytree(policy_dir, tmp_path, dirs_exist_ok=True)
    AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="num_labels=3, but a reward model gives 1 number"):
        core(tmp_path, policy_dir)


def batch() -> list[FreshGroup]:
    groups = [a_group(3, rewards=(0.0, 1.0, 0.5)) for _ in range(2)]
    return [
        FreshGroup(Experience(f"g{n}", a_request(n=3), group), (True, True, False)) for n, group in enumerate(groups)
    ]


def test_rewards_are_the_weighted_sum_over_fresh_samples() -> None:
    config = RewardModelConfig(path=Path("m"), weight=0.5, verifier_weight=2.0)
    scores = {(g, i): float(10 * g + i) for g in range(2) for i in range(2)}
    found = rewarded(batch(), scores, config)
    rewards = [group.experience.group.rewards_G for group in found.groups]
    assert rewards == [(0.0, 2.5, 1.0), (5.0, 7.5, 1.0)]
    assert found.metrics == {
        "rejected_groups": 0.0,
        "reward_model_mean": 5.5,
        "reward_model_std": pytest.approx(np.std([0, 1, 10, 11])),
        "verifier_mean": 0.5,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_group_with_a_score_that_is_not_finite_is_rejected_with_the_reason(bad: float) -> None:
    found = rewarded(batch(), {(0, 0): 1.0, (0, 1): bad, (1, 0): 1.0, (1, 1): 2.0}, RewardModelConfig(path=Path("m")))
    assert [group.experience.group_id for group in found.groups] == ["g1"]
    assert found.rejected == {"g0": f"the reward model's score of sample 1 is {bad} (1 of 2 are not finite)"}


class Scorer:
    """Gives what it is told to, in the order in which it is asked: the longest first."""

    world_size = 1

    def __init__(self, values: list[float]) -> None:
        self._values = values

    async def dispatch(self, method: str, shares: Any, *args: Any) -> list[Any]:
        (share,) = shares
        return [np.array(self._values[: len(share)], np.float32)]


@pytest.mark.parametrize(
    ("values", "applied", "rejected"),
    [([1.0, 2.0, 3.0, 4.0], True, []), ([1.0, math.nan, 3.0, 4.0], True, ["g1"]), ([1.0], False, ["g0", "g1"])],
)
async def test_a_step_trains_the_groups_that_have_a_reward(
    policy_dir: Path, tmp_path: Path, values: list[float], applied: bool, rejected: list[str]
) -> None:
    config = train_config(
        tmp_path, RedisConfig(), "run", policy_dir, reward_model={"path": policy_dir}, algorithm={"ppo_epochs": 2}
    )
    workers = Workers(Rank(a_policy(policy_dir, ppo_epochs=2)), reward=Scorer(values))  # type: ignore[arg-type]
    result = await update(batch(), step=1, seed=0, same_weights={0}, config=config, workers=workers)
    assert (result.applied, sorted(result.rejected)) == (applied, rejected)
    assert [group.experience.group_id for group in result.groups] == [g for g in ("g0", "g1") if g not in rejected]


async def test_rejected_groups_end_dead_with_the_reason_and_the_others_stay() -> None:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    await queue.submit([a_request(i) for i in range(2)])
    for lease in await queue.lease("engine", count=2, lease_s=60, purposes=[Purpose.TRAIN]):
        await queue.complete(lease, a_group())
    first, second = await queue.lease_experience(token, count=2)
    intake = Intake(groups=[FreshGroup(one, (True, True)) for one in (first, second)])
    await reject(queue, token, intake, {first.group_id: "no score"})
    assert [group.experience for group in intake.groups] == [second]
    ledger = await queue.ledger()
    assert (ledger.dead, ledger.experience, ledger.balance) == (1, 1, 0)
    assert [letter.reason for letter in await queue.dead_letters(count=1)] == ["no score"]


class Lengths:
    """Two ranks that score a transcript by its length."""

    world_size = 2

    async def dispatch(self, method: str, shares: Any, *args: Any) -> list[Any]:
        return [np.array([one.length for one in share], np.float32) for share in shares]


async def test_scores_come_back_to_the_samples_they_are_of() -> None:
    groups = batch()
    samples = groups[0].experience.group.samples_G
    expected = [len(s.segments[-1].prompt_ids_P) + s.num_response_tokens for s in samples[:2]]
    assert expected[0] != expected[1]
    found = await model_scores(Lengths(), groups)  # type: ignore[arg-type]
    assert found == {(g, i): expected[i] for g in range(2) for i in range(2)}


def test_transcripts_are_dealt_by_tokens() -> None:
    assert deal([1, 9, 5, 4, 2], 2) == [[1, 4], [2, 3, 0]]
