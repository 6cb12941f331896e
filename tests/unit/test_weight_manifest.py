"""A manifest says what its version is, and an older one is still read."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import WeightsError
from rollout.weights import AdapterForm, Bucket, Canary, TensorSpec, WeightManifest
from trainer.lora import adapter_form

CANARY = Canary(((1, 2, 3),), ((-1.0, -2.0),))
BUCKETS = (Bucket("model.safetensors", 11, "ab" * 32),)


def manifest(adapter: AdapterForm | None = None) -> WeightManifest:
    spec = TensorSpec("w", "float32", (2, 3), "model.safetensors")
    return WeightManifest("policy", 7, 3, (spec,), BUCKETS, CANARY, 5, 9, adapter)


forms = st.builds(
    AdapterForm, rank=st.integers(1, 512), target_modules=st.lists(st.text(max_size=9)).map(tuple), base=st.text()
)


@given(st.none() | forms)
def test_what_is_written_is_read_again(form: AdapterForm | None) -> None:
    written = manifest(form)
    assert WeightManifest.from_json(written.to_json()) == written
    assert written.form == ("full" if form is None else "adapter")


def test_a_manifest_from_before_adapters_is_one_of_whole_weights() -> None:
    raw: dict[str, Any] = json.loads(manifest().to_json())
    del raw["adapter"]
    read = WeightManifest.from_json(json.dumps({**raw, "schema": 1}))
    assert (read, read.form) == (manifest(), "full")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 3}, "manifest schema is 3, known are 1, 2"),
        ({"adapter": {"rank": 4}}, "not a weight manifest"),
        ({"adapter": "adapter"}, "not a weight manifest"),
        ({"digest": "0"}, "digest 0 but buckets say"),
    ],
)
def test_what_is_no_manifest_is_refused(change: dict[str, Any], words: str) -> None:
    raw = json.loads(manifest(AdapterForm(4, ("q_proj",), "b")).to_json())
    with pytest.raises(WeightsError, match=words):
        WeightManifest.from_json(json.dumps({**raw, **change}))


@pytest.mark.parametrize(
    "names",
    [
        *(("/tmp/model.safetensors",), ("../model.safetensors",), ("a/model.safetensors",), ("..",), ("",)),
        *(("model.safetensors\n",), ("a\0.safetensors",), (".safetensors",), ("config.json",), (7,)),
        ("model.safetensors", "model.safetensors"),
    ],
    ids=repr,
)
def test_buckets_are_files_beside_the_manifest_each_of_its_own(names: tuple[str, ...]) -> None:
    written = replace(manifest(), buckets=tuple(Bucket(name, 11, "ab" * 32) for name in names))
    with pytest.raises(WeightsError, match=r"bucket|not a weight manifest"):
        WeightManifest.from_json(written.to_json())


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "adapter_model.safetensors"])
def test_names_that_a_trainer_gives_its_buckets_are_read(name: str) -> None:
    written = replace(manifest(), buckets=(Bucket(name, 11, "ab" * 32),))
    assert WeightManifest.from_json(written.to_json()) == written


def test_the_form_of_an_adapter_is_read_from_its_tensors() -> None:
    prefix = "base_model.model.model.layers"
    names = [f"{prefix}.{i}.self_attn.{name}" for i in (0, 1) for name in ("v_proj", "q_proj")]
    tensors = [
        TensorSpec(f"{name}.lora_{half}.weight", "float32", shape, "a")
        for name in names
        for half, shape in (("A", (4, 64)), ("B", (32, 4)))
    ]
    form = adapter_form(tensors, {"model.safetensors": "ab"})
    assert (form.rank, form.target_modules) == (4, ("q_proj", "v_proj"))
    assert form.base == adapter_form(tensors, {"model.safetensors": "ab"}).base
    assert form.base != adapter_form(tensors, {"model.safetensors": "cd"}).base
