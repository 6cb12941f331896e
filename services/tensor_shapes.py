"""Whether a version's tensors are those of the model that an engine was started with."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from rollout.weights import WeightManifest

Shapes = Mapping[str, tuple[int, ...]]


def shapes_in(model: Path) -> Shapes:
    """Of the tensors in a model's directory, by name, from the headers of its files."""
    found: dict[str, tuple[int, ...]] = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is not a mapping
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def misshapen(manifest: WeightManifest, model: Shapes) -> str:
    """Why an engine of this model cannot load the version; empty where no tensor that both have says so.

    Names that only one has are no reason: an output layer that is tied to the embeddings may be there or not.
    """
    for tensor in manifest.tensors:
        if (shape := model.get(tensor.name)) is not None and shape != tuple(tensor.shape):
            return (
                f"version {manifest.version} is of another model: its {tensor.name} is {_by(tensor.shape)}, that of the"
                f" fleet's model.path {_by(shape)}; train the model that the fleet serves, or give the run a fleet of"
                " its own (fleet_name)"
            )
    return ""


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
