"""The frozen reward model of one rank: a sequence classifier of one label."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from trainer.config import RewardModelConfig, WorkersConfig
from trainer.errors import ModelError
from trainer.models import context_length, load_silenced, load_tokenizer
from trainer.partition import buckets, deal
from trainer.rows import FloatArray
from trainer.transcript import Transcriber, Transcript

_ENDLESS = 1_000_000_000
"""A tokenizer without a limit says 10^30."""


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """What every rank of the reward group is started with."""

    model_dir: Path
    policy_dir: Path
    """Whose tokenizer made the transcripts."""
    workers: WorkersConfig
    config: RewardModelConfig


class RewardCore:
    """Scores transcripts; needs no process group."""

    def __init__(self, spec: RewardModelSpec) -> None:
        """Raises ModelError for a broken directory, one of another number of labels or one without its head."""
        path, config = spec.model_dir, spec.config
        self._device = torch.device(spec.workers.device)
        self._max_tokens = spec.workers.max_tokens_per_micro_batch
        # RoBERTa's positions begin behind its padding id: its tokenizer's limit is below that of its config.
        own = load_tokenizer(path).model_max_length
        limits = [limit for limit in (config.max_length, context_length(path), own) if limit and limit < _ENDLESS]
        self._transcribe = Transcriber(
            spec.policy_dir, path, chat_template=config.chat_template, max_length=min(limits, default=None)
        )
        self._model = _load(path, config.dtype).to(self._device)
        self._embeddings = embeddings = int(self._model.get_input_embeddings().weight.shape[0])
        if embeddings < self._transcribe.vocabulary:
            raise ModelError(
                f"{path}: its tokenizer gives {self._transcribe.vocabulary} ids, its embedding has {embeddings}"
            )
        text = self._model.config.get_text_config()
        self._text_config, self._pad = text, text.pad_token_id

    def scores(self, transcripts: Sequence[Transcript]) -> FloatArray:
        """One score [N] a transcript, float32, the same whatever else is scored with it; nan for one that the model
        cannot read, because nothing is left of it or a token is beyond the embedding.
        """
        sequences = [self._transcribe(transcript) for transcript in transcripts]
        scores_N = np.full(len(sequences), np.nan, np.float32)
        readable = [n for n, ids in enumerate(sequences) if ids and max(ids) < self._embeddings]
        with torch.no_grad():
            for chunk in self._chunks([len(sequences[n]) for n in readable]):
                picked = [readable[index] for index in chunk]
                scores_N[picked] = self._forward([sequences[n] for n in picked])
        return scores_N

    def _chunks(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of sequences that are computed together."""
        (longest_first,) = deal(lengths, 1)
        return buckets(lengths, longest_first, self._max_tokens, packed=False)

    def _forward(self, sequences: Sequence[list[int]]) -> FloatArray:
        pad = self._pad
        if pad is None:
            # Decoders score the last token that is not a pad, so one that ends no sequence has to stand for it.
            pad = self._text_config.pad_token_id = unused({ids[-1] for ids in sequences})
        width = max(map(len, sequences))
        ids_BL = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in sequences])
        attention_BL = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
        logits = self._model(input_ids=ids_BL.to(self._device), attention_mask=attention_BL.to(self._device)).logits
        if logits.shape != (len(sequences), 1):
            raise ModelError(f"the reward model gave logits {tuple(logits.shape)} for {len(sequences)} sequences")
        return np.asarray(logits[:, 0].float().cpu().numpy(), np.float32)


def _load(path: Path, dtype: str) -> Any:
    model = load_silenced(AutoModelForSequenceClassification, path, dtype)
    if model.config.num_labels != 1:
        raise ModelError(f"{path} has num_labels={model.config.num_labels}, but a reward model gives 1 number")
    return model


def unused(ids: set[int]) -> int:
    """The smallest token id that is not among them."""
    return next(candidate for candidate in range(len(ids) + 1) if candidate not in ids)
