"""Whether the engines of a fleet can load what a run publishes."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from rollout.board import Board, Heartbeat
from rollout.errors import ConfigError, StoreUnavailable
from trainer.lora_config import LoraConfig

_LOOK_S = 5.0

_REMEDY = (
    'publish = "adapter" of [train.lora] goes with a fleet of sharing.mode=adapter, and everything else with one of'
    " another mode"
)


def check_fleet(lora: LoraConfig | None, fleet: str, replicas: Iterable[Heartbeat]) -> None:
    """Raises ConfigError where one of the replicas says that it cannot; those that come later refuse by themselves."""
    for beat in replicas:
        why = misfit(lora, fleet, mode=beat.sharing, max_lora_rank=beat.max_lora_rank, layers=beat.adapter_layers)
        if why:
            raise ConfigError(why)


async def until_misfit(
    lora: LoraConfig | None,
    fleet: str,
    board: Board,
    *,
    waits: Callable[[], bool],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Look at the replicas now and then while the run `waits` for them: a fleet that is started after the trainer is
    none that it could refuse at its own start, and would never generate for it. Never returns.

    Raises ConfigError as `check_fleet` does. A server that does not answer is left to those who need it.
    """
    while True:
        await sleep(_LOOK_S)
        if not waits():
            continue
        try:
            replicas = await board.replicas(fleet)
        except StoreUnavailable:
            continue
        if waits():
            check_fleet(lora, fleet, replicas)


def misfit(
    lora: LoraConfig | None, fleet: str, *, mode: str, max_lora_rank: int | None, layers: Collection[str]
) -> str:
    """Why engines of this mode cannot load the run's versions; empty when they can.

    `max_lora_rank` is None where the engines take no adapters. `layers` are those that adapters can change there, empty
    where it is not known; a run that names none in `target_modules` is known by its first version only.
    """
    published = "whole weights: train.lora is not set" if lora is None else f"train.lora.publish={lora.publish}"
    adapter = lora is not None and lora.publish == "adapter"
    if adapter != (mode == "adapter"):
        takes = "adapters alone" if mode == "adapter" else "whole weights"
        return f"the run publishes {published}, but fleet {fleet} has sharing.mode={mode} and takes {takes}; {_REMEDY}"
    if lora is None or not adapter:
        return ""
    if max_lora_rank is not None and lora.r > max_lora_rank:
        return f"train.lora.r={lora.r} is above sharing.max_lora_rank={max_lora_rank} of fleet {fleet}"
    if layers and (unserved := sorted(set(lora.target_modules) - set(layers))):
        return (
            f"train.lora.target_modules={','.join(lora.target_modules)} names {', '.join(unserved)}, but engines of"
            f" fleet {fleet} serve adapters of {', '.join(sorted(layers))} (sharing.target_modules)"
        )
    return ""
