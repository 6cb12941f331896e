"""Two loops that took turns over the same batch: what their times say. Everything here is a pure function."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

BAR, GOAL = 0.90, 0.95
"""Of the trainer's tokens/s over the bare loop's."""
PACKING_TOLERANCE: Mapping[str, float] = MappingProxyType({"float32": 1e-5, "bfloat16": 5e-3})
"""How far the loss of a packed step may be from that of the padded one."""
_DENSE_BF16_FLOPS: Mapping[str, float] = MappingProxyType(
    {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
)
"""Peak of a device by a part of its name, from the vendor's data sheets, without sparsity; the first that fits."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step."""

    wall_s: float
    cpu_s: float
    """Of all threads of the process; what a process beside it takes is not in it."""


@dataclass(frozen=True, slots=True)
class Round:
    """One step of each, next to each other in time."""

    trainer: Cost
    bare: Cost

    @property
    def ratio(self) -> float:
        """Of the trainer's tokens/s over the bare loop's: below 1 where the trainer is the slower one."""
        return self.bare.wall_s / self.trainer.wall_s

    @property
    def cpu_ratio(self) -> float:
        """The same of CPU time."""
        return self.bare.cpu_s / self.trainer.cpu_s


def rates(rounds: Sequence[Round], tokens: int) -> dict[str, Any]:
    """Medians over the rounds, and how far these disagree. `tokens` are those of a step, without padding.

    The ratio is the median of the rounds' own ratios, because the machine treated the two steps of a round alike.
    """
    ratios = [each.ratio for each in rounds]
    return {
        "trainer_tok_s": tokens / median(each.trainer.wall_s for each in rounds),
        "bare_tok_s": tokens / median(each.bare.wall_s for each in rounds),
        "ratio": median(ratios),
        "ratio_spread": max(ratios) - min(ratios),
        "ratio_of_rounds": ratios,
        "cpu_ratio": median(each.cpu_ratio for each in rounds),
        "rounds": [asdict(each) for each in rounds],
    }


def step_flops(config: Any, *, parameters: int, lengths_R: Sequence[int], predicted: int) -> float:
    """Floating point operations that the model's formula asks of one forward and backward pass over rows.

    6 for each token and weight of a matrix product, as in PaLM (arXiv 2204.02311, appendix B), whose term for attention
    is halved here because only what lies before a token counts. `config` is the model's, with tied embeddings: the
    output layer works on the `predicted` tokens alone and looking up a token costs nothing. Neither padding nor
    recomputation counts.
    """
    output_layer = config.vocab_size * config.hidden_size
    matrices = (parameters - output_layer) * sum(lengths_R) + output_layer * predicted
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * sum(n * n for n in lengths_R)
    return 6.0 * (matrices + attention)


def utilisation(flops: float, seconds: float, device: str) -> float | None:
    """Model-FLOPs utilisation in bfloat16 of a device by its name; None where its peak is not known here."""
    peak = next((peak for name, peak in _DENSE_BF16_FLOPS.items() if name in device), None)
    return None if peak is None else flops / seconds / peak


def packing_gap(padded: Mapping[str, float], packed: Mapping[str, float], dtype: str) -> dict[str, Any]:
    """The step's loss with padding and without, as sums of the same rows, and whether they agree."""
    gap, tolerance = abs(padded["loss"] - packed["loss"]), PACKING_TOLERANCE[dtype]
    return {
        "padded_loss": padded["loss"],
        "packed_loss": packed["loss"],
        "gap": gap,
        "tolerance": tolerance,
        "agree": gap <= tolerance,
    }


def shortfalls(figures: Mapping[str, Any]) -> list[str]:
    """What falls short, a sentence each; empty where the bench passes."""
    found = []
    if figures["ratio"] < BAR:
        found.append(f"the trainer reaches {figures['ratio']:.3f} of the bare loop's tokens/s; the bar is {BAR:.2f}")
    packing = figures.get("packing")
    if packing is not None and not packing["agree"]:
        reason = packing.get("reason") or (
            f"loss {packing['packed_loss']:.6g} packed and {packing['padded_loss']:.6g} padded are {packing['gap']:.3g}"
            f" apart; the tolerance is {packing['tolerance']:g}"
        )
        found.append(f"packing: {reason}")
    return found
