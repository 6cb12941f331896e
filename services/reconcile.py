"""The loop that keeps a replica's weights at the version its fleet's run calls current.

    invitation of an epoch --ack, membership--> receive (or read the receiver's copy) --\\
    weights:current differs --------------------> read the artefact ---------------------> swap -> canary -> verified
                                                                                                       \\-> not fit
    no run attached any more: what the other replicas have, see `keeping` -> read the artefact -> the same
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial

import structlog

from rollout.board import AppliedPush, Board, CurrentVersion, Invitation, Pin
from rollout.errors import NightshiftError, StoreUnavailable, WeightsError
from rollout.weights import Canary, WeightManifest
from services.background import in_background
from services.collective import InReplica, Receiver
from services.delivery import Delivery, from_artefact
from services.epochs import Epochs
from services.keeping import Keeping
from services.push_config import PushConfig
from services.push_log import PushLog
from services.staging import Staging
from services.swap import EngineBroken, Weights
from services.tries import Tries, patience
from services.user_window import RequestTimes

_OUTAGE_WAIT_S = 1.0

_log = structlog.get_logger(__name__)


class Reconciler:
    """Follows the run attached to the fleet; `version` is the verified one in use (0: the model as loaded)."""

    attached: str | None = None
    """Run that the fleet followed at the last look."""
    following: bool = True
    """False while the engine holds other weights than the run's, see `rest`."""
    pin: Pin | None = None
    """Of the fleet, whichever replica it holds."""
    run_name: str | None = None
    """Run whose weights are in use; None for the model as loaded."""
    coming: str | None = None
    """Run whose weights are on their way into the engine, from the invitation to the check: the cores that receive
    and prepare them may be the engine's."""
    unchecked: int | None = None
    """Version that is in the engine, or on its way into it, and whose check is not over."""
    version: int = 0
    detail: str = "not compared with the current version yet"

    def __init__(
        self,
        *,
        fleet: str,
        replica: str,
        host: str,
        board: Board,
        swap: Weights,
        staging: Staging,
        config: PushConfig,
        max_lag: int,
        model: str,
        on_untrusted: Callable[[str, int], None],
        on_coming: Callable[[str], None] = lambda _: None,
        receivers: Mapping[str, Receiver] | None = None,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        users: Callable[[], Mapping[str, RequestTimes]] = dict,
    ) -> None:
        """The engine loads `model`. Within `turn` it may stand still; `on_coming` is told the run whose weights come,
        before they do; `users` are users' sequences in the engine now."""
        self._fleet = fleet
        self._replica = replica
        self._board = board
        self._swap = swap
        self._config, self._max_lag = config, max_lag
        self._on_untrusted = on_untrusted
        self._on_coming = on_coming
        self._epochs = Epochs(
            fleet=fleet,
            replica=replica,
            host=host,
            board=board,
            staging=staging,
            receivers=receivers or {"gloo": InReplica()},
            accept=self._accept,
        )
        self._turn = turn
        self._tokens: dict[str, int] = {}
        self._joined: Invitation | None = None
        self._tries = Tries(config.watchdog_s)
        self._keeping = Keeping(board, fleet=fleet, model=model)
        self._target: CurrentVersion | None = None
        self._caught_up = False
        self._trusted, self._doubted = True, False
        self._failed = False
        """Whether the weights in use were checked again, and were not right."""
        self._canary: Canary | None = None
        """Of the version in use; None for the model as loaded."""
        self._settled, self._undisturbed = asyncio.Event(), asyncio.Event()
        self._settled.set()
        self._undisturbed.set()
        self.news = asyncio.Event()
        """Set when a delivery ended, for a heartbeat that does not wait its turn."""
        self.pushes = PushLog(users, changed=self.news.set)

    @property
    def fit(self) -> bool:
        """Whether the weights in use are verified and, where they are the run's, recent enough for rollouts."""
        if not self.following:
            return True
        recent = self.pinned is not None or (self.lag <= self._max_lag and not self._holds_another_runs)
        return self._caught_up and self._trusted and recent and not self._doubted

    @property
    def pinned(self) -> int | None:
        """The version at which an evaluation holds this replica."""
        pin = self.pin
        if pin is None or pin.replica != self._replica or not self._has(pin.run, pin.version):
            return None
        return pin.version

    @property
    def lag(self) -> int:
        """Versions behind the current one."""
        return max(0, self._target.version - self.version) if self._target else 0

    @property
    def _holds_another_runs(self) -> bool:
        """Whose numbers say nothing of how recent the weights are."""
        known = self.attached is not None and self._target is not None
        return known and self.run_name not in {None, self.attached}

    async def published(self) -> bool:
        """Whether there is a version to follow."""
        run = await self._board.attached_run(self._fleet)
        return run is not None and await self._board.current(run) is not None

    def start_at_rest(self) -> None:
        """Follow nothing from the beginning: the engine holds other weights than the run's."""
        self.following, self.detail = False, ""

    async def rest(self) -> None:
        """Follow nothing, because other weights are to come into the engine; returns when none of the run's are on
        their way into it."""
        self.following = False
        await self._undisturbed.wait()
        self._know(None)
        self.run_name, self.version, self.pin, self.detail = None, 0, None, ""

    def follow(self, *, verified: bool) -> None:
        """Follow the run again. `verified`: the engine holds the model as loaded, version 0, and it was checked."""
        self._know(None)
        self.following, self._trusted, self._caught_up, self._target = True, verified, False, None
        self._failed = False
        self.run_name, self.version, self.detail = None, 0, "not compared with the current version yet"

    def doubt(self) -> None:
        """The engine was silent for a while: what it computes with a run's weights is checked again before they are fit
        for rollouts, and before anything of theirs is handed in."""
        if self.following and self._canary is not None:
            self._doubted = True
            if self.unchecked is None:  # otherwise a version is being checked, whose tokens those in doubt would hide
                self.unchecked = self.version
            self._settled.clear()

    def _know(self, canary: Canary | None) -> None:
        """By which to check the weights in use, of which nothing is in doubt."""
        self._canary, self._doubted, self.unchecked = canary, False, None
        self._settled.set()

    async def settled(self) -> None:
        """Returns when no swap and no check is running."""
        await self._settled.wait()

    async def run(self) -> None:
        """Compare and catch up until cancelled. Raises EngineBroken: then only a restart of the replica helps."""
        failures = 0
        while True:
            try:
                await self.step()
                failures = 0
                await asyncio.sleep(self._config.poll_s)
            except EngineBroken:
                raise
            except StoreUnavailable as error:
                _log.warning("board_unavailable", error=str(error))
                await asyncio.sleep(_OUTAGE_WAIT_S)
            except NightshiftError as error:
                failures, self.detail = failures + 1, str(error)
                _log.warning("reconcile_failed", error=self.detail)
                await asyncio.sleep(_OUTAGE_WAIT_S * patience(failures))
            except Exception as error:
                # The weights in use go on serving users; a replica that ended here would take their requests with it
                # and be replaced by one that meets the same. How far behind it is, is not known any more.
                self._caught_up, self.detail = False, repr(error)
                _log.exception("reconcile_failed")
                await asyncio.sleep(_OUTAGE_WAIT_S)

    async def step(self) -> None:
        """One look at the board, and the one delivery it calls for."""
        if not self.following:
            return
        if self._doubted:
            await self._check_again()
        run = self.attached = await self._board.attached_run(self._fleet)
        if run is None:
            self.pin = None
            await self._go_on_without()
            return
        await self._look_for_pin(run)
        # The pointer before the invitation: an epoch is opened before its version becomes current, so whoever sees a
        # new version also sees the invitation to it, and does not take the artefact in its stead.
        self._target = await self._board.current(run)
        if self._target is not None:
            self._keeping.followed = run
        if self.pinned is not None:
            self._in_step()
            return
        invitation = await self._board.invitation(self._fleet) if self._config.collective else None
        if invitation is not None and self._wanted(invitation, run):
            await self._join(invitation)
            self._target = await self._board.current(run)
        if self._target is None:
            await self._go_on_without()
        elif self._has(run, self._target.version):
            self._in_step()
        elif not self._newest_token(run, self._target.fencing_token):
            self.detail = (
                f"version {self._target.version} has fencing token {self._target.fencing_token}, an earlier one of run"
                f" {run} had {self._tokens[run]}: an older trainer's, or Redis lost its data; then restart the replicas"
            )
        elif self._tries_left(run, self._target.version, self._target.digest):
            await self._take_artefact(run, self._target)

    async def _go_on_without(self) -> None:
        """A run, or while one has published nothing: with what this replica has, or what others have that it had."""
        newer = await self._keeping.newer((self.run_name, self.version) if self._trusted else None)
        self._target = None if newer is None else newer.current
        if newer is None or self._has(newer.run, newer.current.version):
            self._in_step()
        elif self._tries_left(newer.run, newer.current.version, newer.current.digest):
            await self._take_artefact(newer.run, newer.current)

    async def _take_artefact(self, run: str, current: CurrentVersion) -> None:
        with self._arrival(run):
            await self._deliver(await in_background(from_artefact, run, current, partial(self._accept, current)))

    async def _check_again(self) -> None:
        """Where what is in use is not right, or cannot be checked, it is delivered once more."""
        if (canary := self._canary) is None:
            return
        self._undisturbed.clear()
        try:
            gap = await self._swap.gap(canary)
        finally:
            self._undisturbed.set()
        self._trusted = gap <= self._config.canary_tolerance
        if not self._trusted:
            self.detail = f"version {self.version}, checked again: {self._swap.unscored or self._off(gap)}"
            _log.error("version_not_right_any_more", version=self.version, gap=gap, unscored=str(self._swap.unscored))
        if not (self._trusted or self._swap.unscored):
            self._on_untrusted(self.detail, self.version)
        self._failed = not (self._trusted or self._swap.unscored)
        self._know(canary)
        self.news.set()

    def _off(self, gap: float) -> str:
        return f"canary gap {gap:.4g}, tolerance {self._config.canary_tolerance}"

    async def _look_for_pin(self, run: str) -> None:
        """One of another run, or of an older writer, holds nobody."""
        before, pin = self.pinned, await self._board.pinned(self._fleet)
        fits = pin is not None and pin.run == run and self._newest_token(run, pin.fencing_token)
        self.pin = pin if fits else None
        if self.pinned != before:
            self.news.set()

    def _has(self, run: str, version: int) -> bool:
        return self._trusted and (self.run_name, self.version) == (run, version)

    def _in_step(self) -> None:
        if self._trusted:
            self._caught_up, self.detail = True, ""

    def _newest_token(self, run: str, token: int) -> bool:
        """Whether the writer is not an older one than seen before; remembers the newest."""
        newest = max(self._tokens.get(run, 0), token)
        self._tokens[run] = newest
        return token == newest

    def _tries_left(self, run: str, version: int, digest: str) -> bool:
        return self._tries.left((run, version, digest), time.monotonic())

    def _wanted(self, invitation: Invitation, run: str) -> bool:
        return (
            invitation.run == run
            and invitation != self._joined  # not by its number: a Redis that lost its data counts anew
            and not self._has(run, invitation.version)
            and (self.run_name != run or invitation.version > self.version)
            and self._newest_token(run, invitation.fencing_token)
            and self._tries_left(run, invitation.version, invitation.digest)
        )

    async def _join(self, invitation: Invitation) -> None:
        """Take part in one epoch; whatever goes wrong is left to the artefact."""
        self._joined = invitation
        with self._arrival(invitation.run):
            try:
                delivery = await self._epochs.receive(invitation)
            except (WeightsError, OSError) as error:
                _log.warning("epoch_failed", epoch=invitation.epoch, version=invitation.version, error=str(error))
                return
            if delivery is not None:
                await self._deliver(delivery)

    @contextmanager
    def _arrival(self, run: str) -> Iterator[None]:
        self.coming = run
        try:
            with self.pushes.arrival():
                yield
        finally:
            self.coming = None

    def _accept(self, announced: CurrentVersion | Invitation, manifest: WeightManifest) -> None:
        """The manifest is the one that was announced, and of a form that the engine loads. Raises WeightsError."""
        wanted, found = ((one.version, one.digest, one.fencing_token) for one in (announced, manifest))
        if found != wanted:
            raise WeightsError(f"announced version {wanted[0]} of digest {wanted[1]}, found {found[0]} of {found[1]}")
        if why := self._swap.refusal(manifest):
            raise WeightsError(why)

    async def _deliver(self, delivery: Delivery) -> None:
        """Prepare the weights and, when it is this replica's turn, swap them in."""
        if not self.following:
            return
        self._undisturbed.clear()
        try:
            await self._swap.prepare(delivery.directory, wanted=lambda: self.following)
            async with self._turn():
                if self.following:  # others may have been called for since they began to arrive
                    await self._swap_in(delivery)
        finally:
            self._undisturbed.set()

    async def _swap_in(self, delivery: Delivery) -> None:
        """And check what the engine computes with them."""
        # a copy is gone where the receiver of this host went on to a later version
        directory = delivery.directory if delivery.directory.exists() else delivery.artefact
        if not directory.exists():
            raise WeightsError(f"{directory} was retired before it was this replica's turn")
        manifest = delivery.manifest
        key = (delivery.run, manifest.version, manifest.digest)
        self._settled.clear()
        self.unchecked = manifest.version
        verified = unanswered = False
        try:
            self._on_coming(delivery.run)
            pause_s = await self._swap.load(directory, version=manifest.version, fallback=delivery.artefact)
            gap = await self._swap.gap(manifest.canary)
            verified = self._conclude(delivery, pause_s, gap)
            unanswered = self._swap.unscored is not None and self._swap.unscored.late
        finally:
            # where it can go back to what it had, that may have failed its own check
            self._trusted = self._swap.conclude(verified=verified) and (verified or not self._failed)
            self._failed = self._failed and not verified
            self._tries.ended(key, time.monotonic(), verified=verified, unanswered=unanswered)
            if not self._trusted:
                self._on_untrusted(f"version {manifest.version} is not verified", manifest.version)
            if verified or not (self._trusted and self._doubted):
                self._know(manifest.canary if verified else self._canary)
            self.news.set()

    def _conclude(self, delivery: Delivery, pause_s: float, gap: float) -> bool:
        version, verified = delivery.manifest.version, gap <= self._config.canary_tolerance
        self.pushes.add(
            AppliedPush(
                version=version,
                path=delivery.path,
                epoch=delivery.epoch,
                receive_s=delivery.receive_s,
                pause_s=pause_s,
                canary_gap=gap,
                verified=verified,
                applied_at=time.time(),
            )
        )
        if verified:
            self.run_name, self.version, self.detail = delivery.run, version, ""
            self._keeping.hold(delivery.run, delivery.manifest, delivery.artefact)
            _log.info("version_applied", version=version, path=delivery.path.value, pause_s=pause_s, gap=gap)
        else:
            self.detail = f"version {version}: {self._swap.unscored or self._off(gap)}"
            _log.error("version_not_verified", version=version, gap=gap, tolerance=self._config.canary_tolerance)
        return verified
