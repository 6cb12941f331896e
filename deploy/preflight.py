"""What must be true before a fleet is started; each check raises ConfigError with the remedy and changes nothing."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.memory import available_bytes
from rollout.config import RedisConfig
from rollout.errors import ConfigError, StoreUnavailable
from rollout.redis_store import RedisStore
from services.config import FleetConfig
from services.twins import check_twins
from services.user_adapter import check_user_adapter
from trainer.config import TrainConfig, TrainOptions
from trainer.fleet_fit import misfit

_GIB = 1024**3
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "tokenizer_config.json"))
"""Files of which one set is enough for the engine and the trainer."""
_ENGINE_GIB = 2.0
"""Proportional memory of one engine's processes beside weights and KV cache."""
_BASE_GIB = 1.5
"""Ray, Serve, the gateway and Redis."""


def check_fleet(fleet: FleetConfig) -> None:
    """All of them, cheapest first."""
    check_model(fleet.model.path)
    check_user_adapter(fleet.sharing)
    if fleet.lends:
        check_model(fleet.served.path, "lending.production.path")
        check_twins(fleet.model.path, fleet.served.path, dtype=fleet.engine.dtype)
    check_port(fleet.gateway.host, fleet.gateway.port)
    check_memory(fleet, available_bytes())


def check_gpus(fleet: FleetConfig, found: float) -> None:
    """Ray has found so many on this machine."""
    each = fleet.engine.tensor_parallel_size
    needed = fleet.autoscaling.min_replicas * each
    if fleet.engine.device == "gpu" and found < needed:
        raise ConfigError(
            f"engine.device=gpu: {needed} are needed (autoscaling.min_replicas={fleet.autoscaling.min_replicas} x"
            f" engine.tensor_parallel_size={each}), and Ray finds {found:g} on this machine"
        )


def check_model(path: Path, knob: str = "model.path", *, tokenizer: bool = True) -> None:
    """A local Hugging Face directory with config, weights and, unless that is left out, tokenizer.

    Raises ConfigError that names `knob`.
    """
    try:
        _check_files(path, tokenizer=tokenizer)
    except _Unfit as error:
        raise ConfigError(f"{knob}={path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{knob}={path}: {error.filename or path} cannot be read: {error.strerror}; make it readable for this "
            "user, or copy the model again"
        ) from error


def check_models(train: TrainConfig) -> None:
    """Every model that a trainer loads. Raises ConfigError."""
    check_model(train.model.path)
    if train.critic is not None and train.critic.path is not None:
        check_model(train.critic.path, "train.critic.path", tokenizer=False)  # it reads with the policy's
    if train.reward_model is not None:
        check_model(train.reward_model.path, "train.reward_model.path")


def check_sharing(fleet: FleetConfig, train: TrainOptions) -> None:
    """That the fleet's engines can load what the run publishes. Raises ConfigError."""
    sharing = fleet.sharing
    rank, layers = sharing.max_lora_rank, sharing.target_modules
    if why := misfit(train.lora, fleet.fleet, mode=sharing.mode, max_lora_rank=rank, layers=layers):
        raise ConfigError(why)


class _Unfit(ValueError):
    """What is wrong with a model's directory."""


def _check_files(path: Path, *, tokenizer: bool) -> None:
    if not path.is_dir():
        raise _Unfit("no such directory; give a local Hugging Face model directory")
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError as error:
        raise _Unfit("config.json is missing; this is not a Hugging Face model") from error
    except ValueError as error:
        raise _Unfit(f"config.json cannot be read: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise _Unfit("config.json names no architectures; save the model with save_pretrained")
    if not config.get("model_type"):
        raise _Unfit("config.json names no model_type; save the model with save_pretrained")
    _check_weights(path)
    if tokenizer and not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        raise _Unfit("no tokenizer.json; save the tokenizer into the same directory")


def _check_weights(path: Path) -> None:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise _Unfit("no *.safetensors file; save the model with safetensors")
    for file in files:
        _check_shard(file)
    index = path / "model.safetensors.index.json"
    if index.exists():
        _check_index(path, index)


def _check_shard(file: Path) -> None:
    if file.is_symlink() and not file.exists():
        raise _Unfit(f"{file.name} points to {file.readlink()}, which does not exist; download or copy the model again")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, 100_000_000))
    try:
        end = max(entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _Unfit(f"{file.name} is not a safetensors file; copy it again") from error
    if file.stat().st_size < 8 + length + end:
        raise _Unfit(
            f"{file.name} has {file.stat().st_size} bytes and needs {8 + length + end}; "
            "the copy is incomplete, make it again"
        )


def _check_index(path: Path, index: Path) -> None:
    try:
        shards = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unfit(f"{index.name} is not an index of weights; copy it again") from error
    if missing := sorted(name for name in shards if not (path / name).is_file()):
        raise _Unfit(
            f"{', '.join(missing)} of {len(shards)} shards missing, which {index.name} names; the "
            "copy is incomplete, make it again"
        )


def check_port(host: str, port: int) -> None:
    """Nobody listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"fleet.gateway.port={port} on {host} cannot be used: {error.strerror}. Stop what listens there "
                f"(ss -ltnp 'sport = :{port}' shows it) or choose another port with --fleet.gateway.port."
            ) from error


def check_redis(redis: RedisConfig) -> None:
    """The server at `redis.url` answers and takes the login.

    Raises ConfigError for what is no address, StoreUnavailable when nobody answers there.
    """
    # in a thread of its own, because the caller's may already run a loop
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _greet(redis)).result()


async def _greet(redis: RedisConfig) -> None:
    shown = redis.redacted_url
    try:
        store = await RedisStore.connect(redis, role="preflight")
    except StoreUnavailable as error:
        text = str(error).replace(redis.url or shown, shown).rstrip(".")  # it names the address
        raise StoreUnavailable(
            f"redis.url: {text}. Start it, correct the address, or leave redis.url (and REDIS_URL) out for a server of "
            "its own."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"redis.url={shown}: not an address ({error}); redis://host:port, rediss://host:port or unix:///path is "
            "expected"
        ) from None
    await store.close()


def needed_gib(fleet: FleetConfig) -> float:
    """What the replicas that always run take, in GiB."""
    engine = fleet.engine
    weights = sum(file.stat().st_size for file in fleet.model.path.glob("*.safetensors")) / _GIB
    cache = float(engine.kv_cache_gib) if engine.device == "cpu" else 0.0
    return _BASE_GIB + fleet.autoscaling.min_replicas * (_ENGINE_GIB + _copies(fleet) * weights + cache)


def _copies(fleet: FleetConfig) -> int:
    """Of the weights: in use, staged, and one beside those in use where a version is prepared there."""
    engine = fleet.engine
    beside = engine.device == "cpu" and not engine.compile and fleet.sharing.mode != "adapter"
    return 3 if beside and fleet.push.ahead else 2


def check_memory(fleet: FleetConfig, available_bytes: float) -> None:
    """Enough free memory for `autoscaling.min_replicas` engines."""
    needed, available = needed_gib(fleet), available_bytes / _GIB
    if available < needed:
        raise ConfigError(
            f"Not enough memory: {available:.1f} GiB are free and {fleet.autoscaling.min_replicas} engine(s) with "
            f"fleet.engine.kv_cache_gib={fleet.engine.kv_cache_gib} need about {needed:.1f} GiB. Stop other programs, "
            "or lower fleet.autoscaling.min_replicas or fleet.engine.kv_cache_gib."
        )
