"""What cannot be lent is refused before anything starts, with both values named."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.config import load
from rollout.errors import ConfigError
from services.app import validated
from services.config import FleetConfig
from services.twins import check_twins

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 320, "dtype": "float32"}


def model(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def lends(**lending: Any) -> dict[str, Any]:
    return {
        "model": {"path": "/policy"},
        "sharing": {"mode": "lend"},
        "lending": {"production": {"path": "/production", "name": "assistant"}, **lending},
        "autoscaling": {"max_replicas": 2},
        "redis": {"url": "redis://127.0.0.1:6380/0"},
    }


def test_users_are_served_the_production_model_where_replicas_are_lent() -> None:
    config = FleetConfig.model_validate(lends())
    assert (config.lends, str(config.served.path), config.served.name) == (True, "/production", "assistant")


@pytest.mark.parametrize("sharing", [{}, {"mode": "live"}])
def test_a_production_model_is_refused_where_users_would_be_served_the_policy(sharing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        validated({**lends(), "sharing": sharing})
    assert "lending.production.path=/production needs sharing.mode=lend, which is live" in str(refused.value)
    live = FleetConfig.model_validate({**lends(production=None), "sharing": sharing})
    assert (live.lends, str(live.served.path)) == (False, "/policy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"production": None}, ["sharing.mode=lend", "lending.production.path"]),
        ({"min_serving": 2}, ["lending.min_serving=2", "autoscaling.max_replicas=2"]),
        ({"time_zone": "Mars/Olympus"}, ["time_zone='Mars/Olympus'"]),
        ({"reclaim_s": 66}, ["lending.reclaim_s=66", "67 s", "push.watchdog_s=30"]),
        ({"wish_s": 2}, ["lending.wish_s", "greater than or equal to 3"]),
        (
            {
                "calendar": [
                    {"days": ["fri"], "start": "22:00", "end": "06:00", "replicas": 1},
                    {"days": ["sat"], "start": "05:00", "end": "07:00", "replicas": 1},
                ]
            },
            ["fri 22:00-06:00", "sat 05:00-07:00", "overlap"],
        ),
        ({"calendar": [{"start": "22:00Z", "end": "06:00", "replicas": 1}]}, ["22:00:00+00:00", "lending.time_zone"]),
        ({"calendar": [{"start": "22:00", "end": "06:00:30", "replicas": 1}]}, ["06:00:30", "hours and minutes"]),
    ],
    ids=["no production model", "none left", "zone", "push under way", "one hiccup", "overlap", "offset", "seconds"],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        validated(lends(**changes))
    assert all(part in str(refused.value) for part in said)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"harvest": {"max_seats": 0}}, ["sharing.mode=lend", "harvest.max_seats=0"]),
        ({"harvest": {"purposes": []}}, ["harvest.purposes=[]", "eval, train and collect"]),
        ({"engine": {"max_num_seqs": 6}}, ["lending.requests_per_replica=8", "engine.max_num_seqs=6"]),
    ],
)
def test_lending_that_would_help_nobody_is_refused(others: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        validated({**lends(), **others})
    assert all(part in str(refused.value) for part in said)
    asked = {**lends(requests_per_replica=50), "engine": {"max_num_seqs": 6}}
    assert FleetConfig.model_validate(asked).lending.requests_per_replica == 50


def test_replicas_that_rollouts_would_add_are_refused_where_they_have_no_seat_beside_users() -> None:
    budget = {"windows": ["22:00-06:00"], "extra_replicas": 1}
    scaled = {**lends(), "autoscaling": {"max_replicas": 2, "rollout_budget": budget}}
    with pytest.raises(ConfigError) as refused:
        validated(scaled)
    said = ("sharing.mode=lend", "autoscaling.rollout_budget.extra_replicas=1")
    assert all(part in str(refused.value) for part in said)
    live = {**scaled, "sharing": {"mode": "live"}, "lending": {}}
    assert FleetConfig.model_validate(live).autoscaling.rollout_budget is not None


def test_models_that_differ_in_what_does_not_matter_are_twins(tmp_path: Path) -> None:
    policy = model(tmp_path / "policy", transformers_version="5.0", dtype="bfloat16")
    check_twins(policy, model(tmp_path / "production"), dtype="float32")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"hidden_size": 128}, "hidden_size=128"), ({"dtype": "bfloat16"}, "dtype='bfloat16'")],
)
def test_another_architecture_or_type_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    policy, production = model(tmp_path / "policy"), model(tmp_path / "production", **changes)
    with pytest.raises(ConfigError) as refused:
        check_twins(policy, production, dtype="auto")
    (name, value) = next(iter(changes.items()))
    assert all(part in str(refused.value) for part in (str(policy), str(production), said, repr(CONFIG[name])))
    assert value != CONFIG[name]


def test_models_inside_a_model_may_differ_in_what_does_not_matter_too(tmp_path: Path) -> None:
    other = {"_name_or_path": "elsewhere", "transformers_version": "5.0", "use_cache": False, "torch_dtype": "float16"}
    policy = model(tmp_path / "policy", text_config={"depth": 2, "vision_config": {"size": 8}}, audio_config=None)
    production = model(
        tmp_path / "production", text_config={"vision_config": {"size": 8, **other}, **other, "depth": 2}
    )
    check_twins(policy, production, dtype="auto")


def test_models_of_which_one_has_none_inside_are_refused(tmp_path: Path) -> None:
    policy = model(tmp_path / "policy", text_config=None, vision_config=None, dtype=None)
    production = model(tmp_path / "production", text_config={"depth": 2}, vision_config=None, dtype=None)
    with pytest.raises(ConfigError, match=r"has text_config=\{'depth': 2\}, .* has None"):
        check_twins(policy, production, dtype="auto")


def test_types_that_weights_are_stored_in_matter(tmp_path: Path) -> None:
    policy, production = (
        model(tmp_path / dtype, quantization_config={"weight": {"dtype": dtype}}) for dtype in ("fp8_e4m3", "int8")
    )
    with pytest.raises(ConfigError, match=r"quantization_config=.*int8.*fp8_e4m3"):
        check_twins(policy, production, dtype="float32")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("part", ["text_config", "vision_config", "encoder_config"])
def test_a_type_that_only_a_model_inside_says_is_compared_where_the_engine_takes_it(
    tmp_path: Path, part: str, key: str
) -> None:
    policy, production = (
        model(tmp_path / dtype, dtype=None, **{part: {"depth": 2, key: dtype}}) for dtype in ("float16", "bfloat16")
    )
    check_twins(policy, production, dtype="float32")
    with pytest.raises(ConfigError, match=r"has dtype='bfloat16', .* has 'float16'"):
        check_twins(policy, production, dtype="auto")


def test_a_type_is_the_same_wherever_it_is_said(tmp_path: Path) -> None:
    policy = model(tmp_path / "policy", dtype="bfloat16", text_config={"depth": 2, "dtype": "float32"})
    production = model(tmp_path / "production", dtype=None, text_config={"depth": 2, "torch_dtype": "bfloat16"})
    check_twins(policy, production, dtype="auto")


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    names = {f"{number:02}": "same" for number in range(40)}
    policy = model(tmp_path / "policy", id2label={**names, "20": "left"})
    production = model(tmp_path / "production", id2label={**dict(reversed(names.items())), "20": "right"})
    with pytest.raises(ConfigError) as refused:
        check_twins(policy, production, dtype="auto")
    shown = str(refused.value)
    assert "'20': 'right'" in shown
    assert "'20': 'left'" in shown
    assert "..., model.path=" in shown
    assert shown.count("'same'") < 12
    (production / "config.json").write_text((policy / "config.json").read_text())
    for directory, end in ((policy, "one"), (production, "two")):
        (directory / "chat_template.jinja").write_text("{{ messages }}" * 20 + end)
    with pytest.raises(ConfigError, match=r"chat template=\.\.\..*two', .* has \.\.\..*one'"):
        check_twins(policy, production, dtype="auto")


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_another_tokenizer_or_chat_template_is_refused(tmp_path: Path, file: str) -> None:
    policy, production = model(tmp_path / "policy"), model(tmp_path / "production")
    (production / file).write_text('{"model": {"vocab": {"b": 1}}}')
    with pytest.raises(ConfigError, match=r"tokenizer.json|chat template"):
        check_twins(policy, production, dtype="auto")


def test_other_tokens_that_end_an_answer_are_refused(tmp_path: Path) -> None:
    policy, production = model(tmp_path / "policy"), model(tmp_path / "production")
    (policy / "generation_config.json").write_text('{"eos_token_id": 7}')
    (production / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.6}')
    check_twins(policy, production, dtype="auto")
    (production / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    with pytest.raises(ConfigError, match=r"eos_token_id=\[7, 9\].*has \[7\]"):
        check_twins(policy, production, dtype="auto")


def test_a_toml_file_says_all_of_it_and_paths_count_from_here(tmp_path: Path) -> None:
    file = tmp_path / "nightshift.toml"
    file.write_text(
        """
[model]
path = "policy"
[fleet.autoscaling]
max_replicas = 4
[fleet.sharing]
mode = "lend"
[fleet.lending]
time_zone = "Europe/Berlin"
production = {path = "production", name = "assistant"}
[[fleet.lending.calendar]]
days = ["mon", "tue"]
start = "22:00"
end = "06:00"
replicas = 3
"""
    )
    config = load([file]).fleet_config()
    assert config.served.path == Path.cwd() / "production"
    assert [str(lent.window) for lent in config.lending.calendar] == ["mon,tue 22:00-06:00"]
