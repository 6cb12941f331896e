"""A reconciler between a board, an engine and versions that a test moves by hand."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from rollout.board import Board, CurrentVersion, Invitation, Kept, Pin
from rollout.weights import MANIFEST, AdapterForm, Bucket, Canary, WeightManifest, file_sha256, version_dir
from services.push_config import PushConfig
from services.reconcile import Reconciler
from services.staging import Staging
from services.swap import WeightSwap
from services.user_window import RequestTimes


class Engine:
    """Computes what the canary expects while it is `right`."""

    max_scored_tokens = 64

    def __init__(self) -> None:
        self.right = True
        self.prepared: list[Path] = []
        self.loads = 0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None:
        self.prepared.append(directory)

    async def put_back(self) -> None: ...

    async def first_tokens(self, *, within_s: float) -> None: ...

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None: ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        self.loads += 1

    async def set_version(self, version: int) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0 if self.right else -9.0,) * (len(token_ids) - 1)


class Notices:
    """The part of a board that the artefact's way needs."""

    def __init__(self) -> None:
        self.now: CurrentVersion | None = None
        self.pin: Pin | None = None
        self.run: str | None = "run"
        self.of_fleet: Kept | None = None

    async def keep(self, fleet: str, kept: Kept, *, ttl_s: float) -> None:
        self.of_fleet = kept

    async def kept(self, fleet: str) -> Kept | None:
        return self.of_fleet

    async def attached_run(self, fleet: str) -> str | None:
        return self.run

    async def pinned(self, fleet: str) -> Pin | None:
        return self.pin

    async def invitation(self, fleet: str) -> Invitation | None:
        return None

    async def current(self, run: str) -> CurrentVersion | None:
        return self.now


class Stand:
    """A reconciler, and versions of always the same bytes."""

    def __init__(
        self,
        tmp: Path,
        engine: Engine | None = None,
        *,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        users: Callable[[], Mapping[str, RequestTimes]] = dict,
        board: Board | None = None,
        fleet: str = "fleet",
    ) -> None:
        """On `board` where one is given, and then nothing that `publish` says is heard."""
        self.engine, self.board, self.weights = engine or Engine(), Notices(), tmp / "weights"
        self.given_up: list[str] = []
        self.staging = Staging(tmp / "staging", "host-1-a")
        self.reconciler = Reconciler(
            fleet=fleet,
            replica="replica",
            host="host",
            board=board or self.board,  # type: ignore[arg-type]
            swap=WeightSwap(self.engine, watchdog_s=5),
            staging=self.staging,
            config=PushConfig(),
            max_lag=4,
            model="/model",
            on_untrusted=lambda reason, _: self.given_up.append(reason),
            turn=turn,
            users=users,
        )

    def publish(self, version: int, adapter: AdapterForm | None = None) -> None:
        directory = version_dir(self.weights, version)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"equal bytes")
        bucket = Bucket("model.safetensors", 11, file_sha256(directory / "model.safetensors"))
        canary = Canary(((1, 2, 3),), ((-1.0, -1.0),))
        manifest = WeightManifest("policy", version, version, (), (bucket,), canary, 1, 0, adapter)
        (directory / MANIFEST).write_text(manifest.to_json())
        self.board.now = CurrentVersion("policy", version, str(directory), manifest.digest, 1)
