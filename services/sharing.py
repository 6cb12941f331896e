"""How versions get into an engine, and how that is rehearsed, by the fleet's `sharing.mode`."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import structlog

from services.adapter_rehearsal import rehearse_adapter
from services.config import FleetConfig
from services.rehearsal import RehearsalFailed, rehearse
from services.rollout_adapters import RolloutAdapters
from services.staging import Staging
from services.swap import Spare, WeightSwap
from services.tensor_shapes import shapes_in
from services.vllm_engine import USER_ADAPTER, VllmEngine

WayIn = WeightSwap | RolloutAdapters

_log = structlog.get_logger(__name__)


def way_in(
    config: FleetConfig, engine: VllmEngine, aside: Callable[[], AbstractAsyncContextManager[None]], spare: Spare
) -> WayIn:
    """Whole weights in the place of the engine's, for which rollouts step `aside` unless they keep what is computed of
    them, or adapters beside them; for a check of either they `spare` a seat."""
    sharing, watchdog_s = config.sharing, config.push.watchdog_s
    if sharing.mode != "adapter":
        return WeightSwap(
            engine,
            watchdog_s=watchdog_s,
            aside=nullcontext if config.push.rollouts == "keep" else aside,
            spare=spare,
            ahead=config.push.ahead,
            model=config.served.path,
            shapes=shapes_in(config.served.path),
        )
    return RolloutAdapters(
        engine,
        places=sharing.rollout_adapters,
        first=USER_ADAPTER + 1,
        max_rank=sharing.max_lora_rank,
        watchdog_s=watchdog_s,
        spare=spare,
    )


async def rehearsed(way: WayIn, config: FleetConfig, *, staging: Staging, dtype: str) -> float:
    """The gap in nats. Raises RehearsalFailed."""
    try:
        return await _rehearsed(way, config, staging=staging, dtype=dtype)
    finally:
        await asyncio.to_thread(staging.clear)


async def _rehearsed(way: WayIn, config: FleetConfig, *, staging: Staging, dtype: str) -> float:
    model: Path = config.served.path
    tolerance = config.push.canary_tolerance
    if isinstance(way, RolloutAdapters):
        return await rehearse_adapter(way, model=model, staging=staging, dtype=dtype, tolerance=tolerance)
    try:
        return await rehearse(way, model=model, staging=staging, dtype=dtype, tolerance=tolerance)
    except RehearsalFailed as failure:
        # a model of which two copies are not two models is loaded in the pause
        if not await way.give_up_ahead():
            raise
        _log.warning("rehearsed_again", ahead=False, why=str(failure))
        return await rehearse(way, model=model, staging=staging, dtype=dtype, tolerance=tolerance)
