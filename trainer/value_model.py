"""A critic's model: a sequence classifier of one label, asked for the value at every token instead of the last one."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from trainer.batch import MicroBatch
from trainer.errors import ModelError
from trainer.models import load_silenced

_HEAD = "score"
"""What transformers calls the head of every decoder's classifier."""
_PROBE = ((1, 2, 3), (1, 2, 4))
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


class ValueModel(torch.nn.Module):
    """`classifier` with one value a token."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Values float32 [B, L]; that of position t has seen the tokens up to t. Inputs are int64 [B, L]."""
        # The policy's embedding may have more rows than there are tokens, and the critic's fewer of those.
        rows = self.classifier.get_input_embeddings().num_embeddings
        hidden_BLH = self.classifier.base_model(
            input_ids=input_ids.clamp(max=rows - 1), attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return cast(Tensor, getattr(self.classifier, _HEAD)(hidden_BLH)[..., 0].float())


def load_value_model(path: Path, dtype: str) -> ValueModel:
    """On the CPU, in eval mode. The head of a directory that holds a language model starts at 0.

    Raises ModelError as `models.load_policy` does, and where the model is no decoder with a value a token.
    """
    classifier = load_silenced(AutoModelForSequenceClassification, path, dtype, changes={"num_labels": 1}, new=_HEAD)
    if not isinstance(getattr(classifier, _HEAD, None), torch.nn.Linear):
        raise ModelError(f"{path}: {type(classifier).__name__} has no linear head named {_HEAD}: a critic needs one")
    classifier.config.architectures = [type(classifier).__name__]
    model = ValueModel(classifier).eval()
    _check_causal(model, path, dtype)
    return model


def _check_causal(model: ValueModel, path: Path, dtype: str) -> None:
    """A value that has seen the tokens after it would tell the outcome."""
    with torch.no_grad():
        ids_BL = torch.tensor(_PROBE)
        hidden_BLH = model.classifier.base_model(
            input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), use_cache=False
        ).last_hidden_state
    gap = float((hidden_BLH[0, :-1] - hidden_BLH[1, :-1]).abs().max())
    if not gap <= _TOLERANCE[dtype]:
        raise ModelError(f"{path}: {type(model.classifier).__name__} looks at later tokens: a critic has to be causal")


def window_values(model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
    """Values float32 [B, W] before each token of a micro-batch's window, under `model` or an engine around it."""
    values_BL: Tensor = model(
        input_ids=torch.tensor(batch.input_ids_BL, device=device),
        attention_mask=torch.tensor(batch.attention_mask_BL, device=device),
    )
    return values_BL[:, batch.start : -1]
