"""The staleness study's parts: which runs, whose weights, what they add up to, samples that the trainer agrees with."""

from dataclasses import asdict
from itertools import chain
from typing import Any

import pytest
import torch

from tests.tiny_models import ARCHITECTURES, Architecture, build_model, build_tokenizer
from trainer.forward import sequence_logprobs

PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30, 31, 32]]
END = 1


def _record(setting: Any, reward: float, **more: Any) -> dict[str, Any]:
    return {"setting": asdict(setting), "final_reward": reward, "training_reward": reward / 2, "skipped": 0, **more}


def _grid(staleness_grid: Any) -> Any:
    return staleness_grid.grid(("none", "tis"), (0, 8), 2, lr=3e-4, steps=40, groups=16, policy="demo")


def test_every_combination_is_run_and_every_seed_covers_all(bench: Any) -> None:
    settings = _grid(bench("staleness_grid"))
    assert len({(s.correction, s.staleness, s.seed) for s in settings}) == len(settings) == 8
    assert [s.seed for s in settings] == [0] * 4 + [1] * 4


def test_only_runs_without_a_record_of_the_same_settings_are_missing(bench: Any) -> None:
    staleness_grid = bench("staleness_grid")
    wanted = _grid(staleness_grid)
    other = staleness_grid.grid(("none",), (0,), 1, lr=1e-3, steps=40, groups=16, policy="demo")
    records = [_record(wanted[2], 0.5), _record(other[0], 0.5)]
    assert staleness_grid.missing(wanted, records) == [*wanted[:2], *wanted[3:]]
    assert staleness_grid.belonging(wanted, [*records, _record(wanted[2], 0.75)]) == [_record(wanted[2], 0.75)]


def test_cells_hold_mean_and_range_over_seeds(bench: Any) -> None:
    staleness_grid = bench("staleness_grid")
    rewards = (0.9, 0.5, 0.95, 0.2, 0.8, 0.6, 0.93, 0.3)
    records = [_record(s, reward) for s, reward in zip(_grid(staleness_grid), rewards, strict=True)]
    records[-1]["skipped"] = 2
    found = {(cell.correction, cell.staleness): cell for cell in staleness_grid.cells(records)}
    cell = found["none", 0]
    assert (cell.seeds, cell.lowest, cell.highest) == (2, 0.8, 0.9)
    assert cell.reward == pytest.approx(0.85)
    assert cell.training_reward == pytest.approx(0.425)
    assert found["tis", 8].skipped == 2


def test_the_table_has_corrections_down_and_staleness_across(bench: Any) -> None:
    staleness_grid = bench("staleness_grid")
    first, second, *_ = _grid(staleness_grid)
    text = staleness_grid.markdown(staleness_grid.cells([_record(first, 0.954), _record(second, 0.5)]))
    assert text.splitlines() == [
        "| `correction` | k = 0 |",
        "|---|---|",
        "| `none` | 0.95 (0.95 to 0.95) |",
        "| `tis` | 0.50 (0.50 to 0.50) |",
    ]


@pytest.mark.parametrize(("staleness", "sampled_by"), [(0, [0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2])])
def test_a_step_samples_with_the_weights_of_that_many_steps_before(
    bench: Any, staleness: int, sampled_by: list[int]
) -> None:
    history = bench("weight_history").WeightHistory(staleness)
    used = []
    for version in range(5):
        history.append(version, {"weight": torch.tensor(float(version))})
        number, weights = history.stale
        assert weights["weight"] == number
        used.append(number)
    assert used == sampled_by
    assert history.newest[0] == 4


def _sampled(bench: Any, architecture: Architecture, seed: int = 3, **changes: Any) -> Any:
    model = build_model(architecture, build_tokenizer()).eval()
    options = {"n": 4, "max_tokens": 6, "end_id": END, **changes}
    generator = torch.Generator().manual_seed(seed)
    return model, bench("sampler").sample(model, PROMPTS, generator=generator, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_a_forward_pass_over_the_whole_sequence(bench: Any, architecture: Architecture) -> None:
    model, groups = _sampled(bench, architecture)
    assert [len(group) for group in groups] == [4] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group:
            whole = sequence_logprobs(model, (*prompt, *response.token_ids_T.tolist()), torch.device("cpu"))
            expected = whole[len(prompt) - 1 :]
            assert response.logprobs_T.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_response_ends_with_its_first_end_token_or_at_the_limit(bench: Any) -> None:
    """Several end tokens, so that rows leave the batch at different times."""
    _, groups = _sampled(bench, "qwen3_tied", n=24, max_tokens=8)
    frequent = torch.tensor([t for r in chain(*groups) for t in r.token_ids_T.tolist()]).bincount().argmax().item()
    model, groups = _sampled(bench, "qwen3_tied", n=24, max_tokens=8, end_id=frequent)
    responses = list(chain(*groups))
    for response in responses:
        assert frequent not in response.token_ids_T[:-1].tolist()
        assert response.ended == (response.token_ids_T[-1] == frequent)
        assert response.ended or len(response.token_ids_T) == 8
    assert len({len(response.token_ids_T) for response in responses}) > 1
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group[:8]:
            whole = sequence_logprobs(model, (*prompt, *response.token_ids_T.tolist()), torch.device("cpu"))
            assert response.logprobs_T.tolist() == pytest.approx(whole[len(prompt) - 1 :], abs=1e-4)


def test_samples_follow_from_the_seed_alone(bench: Any) -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [response.token_ids_T.tolist() for response in chain(*_sampled(bench, "qwen3_tied", seed)[1])]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_tokens_are_drawn_with_their_probabilities(bench: Any) -> None:
    model, groups = _sampled(bench, "qwen3_tied", n=4000, max_tokens=1)
    drawn = torch.tensor([response.token_ids_T[0] for response in groups[0]])
    with torch.no_grad():
        expected_V = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    found_V = drawn.bincount(minlength=len(expected_V)) / len(drawn)
    assert (found_V - expected_V).abs().sum() < 0.3
