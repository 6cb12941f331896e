"""Peer arm: TRL's GRPOTrainer on the same policy, task and batch, generating with transformers in its own process.

    python tests/bench/peer.py --model DIR --prompts train.jsonl --out peer.json --steps 30

Needs the extra `peer`. Writes seconds a step and the reward of every step.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Train, time every step, write the figures."""
    arguments = _arguments()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    ends: list[float] = []
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=_solved(tokenizer.eos_token_id),
        args=_options(arguments),
        train_dataset=_dataset(arguments),
        processing_class=tokenizer,
        callbacks=[_clock(ends)],
    )
    started = time.perf_counter()
    trainer.train()
    arguments.out.write_text(json.dumps(_figures(started, ends, trainer.state.log_history)))


def _dataset(arguments: argparse.Namespace) -> Any:
    from datasets import Dataset

    lines = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    needed = lines[: arguments.steps * arguments.groups]
    return Dataset.from_list([{"prompt": line["prompt"], "answer": line["answer"]} for line in needed])


def _clock(ends: list[float]) -> Any:
    """A callback that appends the end of every step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    return Clock()


def _options(arguments: argparse.Namespace) -> Any:
    """The batch, loss, optimizer and sampling of our side; nothing saved or reported."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(arguments.out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.groups * arguments.n,
        num_generations=arguments.n,
        max_completion_length=arguments.max_tokens,
        learning_rate=arguments.lr,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def _figures(started: float, ends: list[float], history: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and reward of every step; the first step warms up and is not in the median."""
    steps = [after - before for before, after in zip([started, *ends[:-1]], ends, strict=True)]
    logged = [entry for entry in history if "reward" in entry]
    return {
        "step_s": steps,
        "median_step_s": sorted(steps[1:])[len(steps[1:]) // 2],
        "rewards": [entry["reward"] for entry in logged],
        "mean_length": sum(entry["completions/mean_length"] for entry in logged) / len(logged),
    }


def _solved(eos_token_id: int) -> Any:
    """The demo's reward: the whole word, ended by itself."""

    def solved(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        triples = zip(completions, completion_ids, answer, strict=True)
        return [float(text == expected and ids[-1] == eos_token_id) for text, ids, expected in triples]

    return solved


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=13)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
