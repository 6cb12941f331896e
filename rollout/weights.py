"""Published policy versions: an immutable, digested directory each, with a manifest that is written last.

    <weights_dir>/v00000007/  model-00001-of-00002.safetensors ...   config.json, tokenizer files   manifest.json

The files of `manifest.buckets` are what a push broadcasts, byte for byte, so a directory that arrived by collective and
one read from the artefact store are the same. A directory without a manifest does not exist for readers.
A version is either whole weights or, of a run that trains an adapter and publishes it alone, a PEFT directory:

    <weights_dir>/v00000007/  adapter_model.safetensors   adapter_config.json, tokenizer files   manifest.json
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rollout.errors import WeightsError

MANIFEST = "manifest.json"
_SCHEMA = 2
_READ = frozenset({1, _SCHEMA})
"""Schema 1 knew whole weights alone."""
_CHUNK = 1 << 22
_BUCKET_FILE = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
"""Plain names: receivers write what they are sent under the names that a manifest gives."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the policy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: str
    """File that holds it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One safetensors file: the unit of a push."""

    file: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class Canary:
    """Token sequences and what the trainer computes for them: the proof that pushed weights are the ones in use."""

    token_ids: tuple[tuple[int, ...], ...]
    """Sequences of length L_i >= 2."""
    logprobs: tuple[tuple[float, ...], ...]
    """log p(token_j | tokens before j) at temperature 1 for j = 1 .. L_i - 1."""


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """What an engine must have to take a version that is a LoRA adapter.

    Example: AdapterForm(rank=16, target_modules=("o_proj", "q_proj"), base="9f86d0...").
    """

    rank: int
    target_modules: tuple[str, ...]
    """Last parts of the names of the layers that it changes, sorted."""
    base: str
    """Digest of the weights that it was trained on; that an engine has the same ones is what the canary shows."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Everything a reader needs to trust and load a version."""

    policy: str
    version: int
    step: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    canary: Canary
    fencing_token: int
    created_ms: int
    adapter: AdapterForm | None = None
    """None where the version is whole weights."""

    @property
    def form(self) -> Literal["full", "adapter"]:
        return "full" if self.adapter is None else "adapter"

    @property
    def digest(self) -> str:
        """Of all bytes, through the digests of the buckets in order."""
        return hashlib.sha256("".join(b.sha256 for b in self.buckets).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(b.size for b in self.buckets)

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, "digest": self.digest, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "WeightManifest":
        """Raises WeightsError when the text is not a manifest of this schema or contradicts its own digest."""
        try:
            raw = json.loads(text)
            if (schema := raw.pop("schema")) not in _READ:
                raise WeightsError(f"manifest schema is {schema!r}, known are {', '.join(map(str, sorted(_READ)))}")
            digest = raw.pop("digest")
            canary, adapter = raw["canary"], raw.get("adapter")
            manifest = cls(
                policy=raw["policy"],
                version=raw["version"],
                step=raw["step"],
                tensors=tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in raw["tensors"]),
                buckets=_buckets(raw["buckets"]),
                canary=Canary(
                    tuple(tuple(ids) for ids in canary["token_ids"]), tuple(tuple(lp) for lp in canary["logprobs"])
                ),
                fencing_token=raw["fencing_token"],
                created_ms=raw["created_ms"],
                adapter=adapter and AdapterForm(**{**adapter, "target_modules": tuple(adapter["target_modules"])}),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise WeightsError(f"not a weight manifest: {error!r}") from error
        if manifest.digest != digest:
            raise WeightsError(
                f"manifest of version {manifest.version}: digest {digest} but buckets say {manifest.digest}"
            )
        return manifest


def _buckets(raw: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """Raises WeightsError where two share a file, or one would lie outside the version's directory."""
    buckets = tuple(Bucket(**bucket) for bucket in raw)
    if bad := [bucket.file for bucket in buckets if not _BUCKET_FILE.fullmatch(bucket.file)]:
        raise WeightsError(f"a manifest's bucket is a file beside it, *.safetensors; not {bad[0]!r}")
    if len({bucket.file for bucket in buckets}) < len(buckets):
        raise WeightsError(f"a manifest has two buckets of one file: {', '.join(bucket.file for bucket in buckets)}")
    return buckets


def version_dir(weights_dir: Path, version: int) -> Path:
    """Where a version is published."""
    return weights_dir / f"v{version:08d}"


def read_manifest(directory: Path) -> WeightManifest:
    """The manifest of a published version; raises WeightsError when there is none or it is damaged."""
    try:
        text = (directory / MANIFEST).read_text()
    except OSError as error:
        raise WeightsError(f"no complete version in {directory}: {error}") from error
    return WeightManifest.from_json(text)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def verify_buckets(directory: Path, manifest: WeightManifest) -> None:
    """Check size and digest of every bucket; raises WeightsError naming the first that differs."""
    for bucket in manifest.buckets:
        path = directory / bucket.file
        size = path.stat().st_size if path.exists() else -1
        if size != bucket.size:
            raise WeightsError(f"{path}: {size} bytes, manifest says {bucket.size}")
        if (found := file_sha256(path)) != bucket.sha256:
            raise WeightsError(f"{path}: sha256 {found}, manifest says {bucket.sha256}")


def published_versions(weights_dir: Path) -> list[int]:
    """Numbers of all directories that hold a manifest, ascending."""
    return sorted(int(p.parent.name[1:]) for p in weights_dir.glob(f"v*/{MANIFEST}") if p.parent.name[1:].isdigit())
