"""What a step says of its critic."""

from collections.abc import Sequence

import numpy as np

from trainer.config import CriticConfig
from trainer.engine import StepResult
from trainer.rows import FloatArray, Row


def critic_metrics(result: StepResult, rows: Sequence[Row], config: CriticConfig, *, lr: float) -> dict[str, float]:
    """Of an update over its minibatches, and of the values before it (`value_fit`)."""
    metrics = {
        "critic_lr": lr,
        "value_loss": result.sums["loss"] / result.updates / config.loss_coef,
        "value_clip_fraction": result.sums["clipped"] / max(result.sums["tokens"], 1.0),
        **value_fit(rows),
    }
    return {**metrics, "critic_grad_norm": result.grad_norm} if result.applied else metrics


def value_fit(rows: Sequence[Row]) -> dict[str, float]:
    """Means of values and returns over trained tokens, and the explained variance 1 - Var(R - V) / Var(R).

    The last is left out where all returns are equal. Rows without values give nothing.
    """
    values = _trained(rows, [row.values_T for row in rows])
    returns = _trained(rows, [row.returns_T for row in rows])
    if not len(values) or len(values) != len(returns):
        return {}
    with np.errstate(invalid="ignore"):  # what is not finite skips the step, and its metrics are left out
        fit = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
        if (spread := float(returns.var())) > 0:
            fit["explained_variance"] = 1 - float((returns - values).var()) / spread
    return fit


def _trained(rows: Sequence[Row], arrays_R: Sequence[FloatArray | None]) -> FloatArray:
    kept = [array[row.mask_T > 0] for row, array in zip(rows, arrays_R, strict=True) if array is not None]
    return np.concatenate(kept) if kept else np.zeros(0, np.float32)
