"""A fleet on this machine: embedded Redis, a local Ray, Serve with the gateway and the engines; and its clean end.

    preflight -> lock -> Redis -> guardian -> Ray -> Serve -> healthy      every step undone in reverse, also half-way

`LocalFleet` is a context manager. Nothing listens beyond loopback except the gateway where its host says so.
"""

import ipaddress
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
import structlog

from deploy.announcement import announce, only_one
from deploy.config import NightshiftConfig
from deploy.embedded_redis import EmbeddedRedis
from deploy.failure import config_error, engine_error, last_exception
from deploy.preflight import check_fleet, check_gpus, check_model, check_models, check_port, check_redis, check_sharing
from deploy.processes import Guardian, Tree, interrupt_deferred, uninterrupted
from deploy.ray_directory import RAY, make_ray_directory
from deploy.tokens import Tokens, gateway_tokens, token_file
from rollout.config import RedisConfig
from rollout.errors import ConfigError, NightshiftError
from services.auth import fleet_args, is_loopback
from services.config import AuthConfig, FleetConfig, FleetOptions
from services.environment import check_environment
from services.proxy_limits import limits_beside, proxy_environment
from trainer.ray_start import start_local_ray

log = structlog.get_logger(__name__)

_OBJECT_STORE_BYTES = 256 * 1024**2
_POLL_S = 0.25
_STATUS_POLL_S = 1.0
"""Each look costs the controller what the starting engine could use."""
_SHUTDOWN_S = 30.0
_GRACE_S = 5.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The raylet ends the process group of a worker that was killed: the engine below a replica holds gigabytes. Not its
    # older subreaper: with that, workers ignore SIGCHLD, and all below them read 0 for every exit code, rewards too.
    "RAY_process_group_cleanup_enabled": "true",
    # By itself Ray runs workers at 15, where whatever else the machine does goes before the engine's steps, and work in
    # the background, at 19 at most, gets two fifths of their share of a core instead of a tenth.
    "RAY_worker_niceness": "0",
    # Requests of all sizes leave holes in each of glibc's heaps, eight a core, that nothing gives back: of ten thousand
    # bad ones the proxy kept up to 38 MiB, and 16 at most with two heaps.
    "MALLOC_ARENA_MAX": "2",
    # Engines and trainer share the cores: a thread that spins while it waits keeps the one it waits for from running.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class FleetFailed(NightshiftError, RuntimeError):
    """The fleet did not become healthy; the message says where its logs are."""


class LocalFleet:
    """Starts on `__enter__` or `start()`, ends on `__exit__` or `stop()`.

    Raises ConfigError (before anything is started, or after everything has been ended), StoreUnavailable or FleetFailed
    (after everything has been ended).
    """

    def __init__(
        self,
        config: NightshiftConfig,
        *,
        progress: Callable[[str], None] = lambda _: None,
        spare_cpus: float = 1.0,
    ) -> None:
        """`progress` is told each phase as it begins; `spare_cpus` Ray CPUs are kept for a trainer that joins."""
        self.settings = config
        self.config: FleetConfig = config.fleet_config()
        self.state_dir = config.state_dir.absolute()
        self._progress = progress
        self._spare_cpus = spare_cpus
        self._stack = ExitStack()
        self._embedded: EmbeddedRedis | None = None
        self._ray: LocalRay | None = None
        self.ray_address = ""
        self.tokens: Tokens

    @property
    def url(self) -> str:
        """Of the gateway."""
        gateway = self.config.gateway
        host = client_host(gateway.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{gateway.port}"

    @property
    def redis(self) -> RedisConfig:
        """With the address filled in."""
        return self.config.redis

    def start(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def prepare(self) -> None:
        """The checks, the tokens and the lock: what can be refused before anything runs."""
        check_environment(os.environ)
        if self.settings.train is not None:
            check_sharing(self.config, self.settings.train)
        check_model(self.config.model.path)
        self._stack.enter_context(only_one(self.state_dir, self.config.fleet))
        check_fleet(self.config)
        self._shield()
        self.tokens = gateway_tokens(self.config.gateway, self.state_dir)
        auth = AuthConfig(file=token_file(self.state_dir))  # so that Ray is not told any
        self.config = self.config.model_copy(update={"gateway": self.config.gateway.model_copy(update={"auth": auth})})

    def _shield(self) -> None:
        """Serve's proxy is a process of Ray's and gets its bounds by the environment that Ray is started with."""
        limits = limits_beside(self.config.gateway.limits.max_body_bytes, os.environ)
        os.environ.update(proxy_environment(limits, os.environ))

    def _start(self) -> None:
        self.prepare()
        self._progress("Redis")
        self._start_redis()
        self._start_ray()
        self._serve()
        self._announce()

    def stop(self) -> None:
        """Undo what was done, newest first; may be called at any time and again. Bounded, so Ctrl-C waits for it."""
        with uninterrupted():
            self._stack.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def keep_alive(self) -> None:
        """Start the embedded Redis again where it died; call it every few seconds."""
        if self._embedded is None or self._ray is None:
            return
        # Others may use this server longer than this process lives, so it is none of the tree's.
        self._ray.tree.unmark()
        try:
            self._embedded.start()
        finally:
            self._ray.tree.mark()

    def _start_redis(self) -> None:
        self._embedded, redis = enter_redis(self._stack, self.config.redis)
        self.config = self.config.model_copy(update={"redis": redis})

    def _start_ray(self) -> None:
        self._progress("Ray")
        fleet = self.config
        needed = fleet.autoscaling.max_replicas * max(fleet.engine.cpus, 0.1) + 2 + self._spare_cpus
        self._ray = start_ray(self._stack, num_cpus=needed, embedded=self._embedded)
        self.ray_address = self._ray.address
        check_gpus(fleet, self._ray.gpus)

    def _serve(self) -> None:
        self._progress("Serve")
        with interrupt_deferred():  # an import that is broken off fails as it likes, or is caught by who asked for it
            from ray import serve

            from services.app import application
        self._stack.callback(_shutdown_serve)
        self._start_proxy()
        built = application(fleet_args(self.config), exposed=not is_loopback(self.config.gateway.host))
        target = serve.RunTarget(built, name=self.config.fleet, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        self._wait_until_running()
        self._wait_until_answering()

    def _start_proxy(self) -> None:
        from ray import serve

        http = {"host": self.config.gateway.host, "port": self.config.gateway.port}
        try:
            serve.start(http_options=http, logging_config={"log_level": "WARNING"})
        except Exception:
            check_port(self.config.gateway.host, self.config.gateway.port)  # taken since `prepare`: then that is said
            raise

    def _wait_until_running(self) -> None:
        from ray import serve

        deadline = time.monotonic() + self.settings.start_timeout_s
        self._progress("engine: loading vLLM and the model, then the rehearsal")
        while time.monotonic() < deadline:
            application = serve.status().applications.get(self.config.fleet)
            state = "" if application is None else application.status.value
            if application is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
                messages = [d.message for d in application.deployments.values()]
                why = last_exception([application.message, *messages])
                if (problem := config_error(why)) is not None:
                    raise ConfigError(self._failure(f"failed to start: {problem}"))
                raise FleetFailed(self._failure(f"failed to start: {why}"))
            if state == "RUNNING":
                return
            time.sleep(_STATUS_POLL_S)
        raise FleetFailed(self._failure(f"was not healthy after start_timeout_s={self.settings.start_timeout_s:g} s"))

    def _wait_until_answering(self) -> None:
        self._progress("gateway")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(_POLL_S)
        raise FleetFailed(self._failure("runs, but its gateway does not answer /healthz with 200"))

    def _announce(self) -> None:
        """Leave word for other commands."""
        content = {
            "pid": os.getpid(),
            "url": self.url,
            "ray_address": self.ray_address,
            "redis_url": self.redis.redacted_url,
        }
        path = announce(self.state_dir, self.config.fleet, content)
        self._stack.callback(path.unlink, missing_ok=True)

    def _failure(self, what: str) -> str:
        kept = self.state_dir / "logs"
        if self._ray is not None:
            _keep_logs(self._ray.logs, kept)
            if error := engine_error(self._ray.logs):
                what = f"{what}. The engine's log says: {error}"
        return f"Fleet {self.config.fleet!r} {what}. Everything was stopped again; its logs are in {kept}."


def client_host(host: str) -> str:
    """Where a client on this machine reaches what listens on `host`.

    >>> client_host("gpu-node"), client_host("10.0.0.3")
    ('gpu-node', '10.0.0.3')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def enter_redis(stack: ExitStack, redis: RedisConfig) -> tuple[EmbeddedRedis | None, RedisConfig]:
    """The settings with the address: of the server given, or of the embedded one that is started or joined.

    Raises ConfigError or StoreUnavailable when the server given cannot be used.
    """
    if redis.url is not None:
        check_redis(redis)
        return None, redis
    server = EmbeddedRedis(redis.dir)
    stack.enter_context(server)
    return server, redis.model_copy(update={"url": server.url})


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray that only this process and its children use."""

    address: str
    logs: Path
    tree: Tree
    gpus: float = 0.0
    """That it found."""


def start_ray(stack: ExitStack, *, num_cpus: float, embedded: EmbeddedRedis | None) -> LocalRay:
    """Start Ray on loopback. It ends with the stack or with this process, however that ends.

    `num_cpus` is a lower bound: Ray's CPUs are a number to divide, not cores. Raises ConfigError where no directory for
    Ray's files can be made.
    """
    ray_dir = make_ray_directory()
    stack.callback(shutil.rmtree, ray_dir, ignore_errors=True)
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        # the engines' sockets, which nobody else removes after an engine that was killed
        os.environ["VLLM_RPC_BASE_PATH"] = str(ray_dir)
        stack.callback(os.environ.pop, "VLLM_RPC_BASE_PATH", None)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tree = Tree()
    guardian = Guardian(tree, redis_dir=None if embedded is None else embedded.directory, remove=[ray_dir])
    stack.callback(guardian.dismiss)
    tree.mark()
    stack.callback(tree.end, grace_s=_GRACE_S)
    stack.callback(tree.unmark)
    with interrupt_deferred():  # a process whose connection to Ray was made half-way crashes when it exits
        import ray

        stack.callback(ray.shutdown)
        start_local_ray(
            num_cpus=math.ceil(max(num_cpus, psutil.cpu_count() or 1)),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="nightshift",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(ray_dir / RAY),
        )
    address, gpus = str(ray.get_runtime_context().gcs_address), ray.cluster_resources().get("GPU", 0.0)
    return LocalRay(address, ray_dir / RAY / "session_latest" / "logs", tree, gpus)


def check_trainer(config: NightshiftConfig) -> None:
    """What a trainer needs before it starts. Raises ConfigError."""
    train = config.train_config()
    if config.fleet != FleetOptions():  # else it says nothing of the fleet, which has a configuration of its own
        check_sharing(config.fleet_config(), train)
    check_models(train)
    for field, path in (("train.prompts.train", train.prompts.train), ("train.prompts.eval", train.prompts.eval)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{field}={path}: no such file; give a JSONL file with one prompt a line")


def _shutdown_serve() -> None:
    """Bounded: a replica that does not let go is ended with the rest of the tree."""
    from ray import serve

    worker = threading.Thread(target=serve.shutdown, daemon=True)
    worker.start()
    worker.join(_SHUTDOWN_S)
    if worker.is_alive():
        log.warning("serve_shutdown_slow", seconds=_SHUTDOWN_S)


def _keep_logs(logs: Path, target: Path) -> None:
    """Ray's directory goes with the fleet; its logs are wanted after a failure."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(logs, target, ignore=shutil.ignore_patterns("*.sock*"), dirs_exist_ok=True)
