"""Ray Serve itself routes users around a replica that is lent, and brings a refusal back to the gateway."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway import EngineBackend
from services.refusals import STALE_S
from services.role_router import ROLE, NotServing

BODY = {"model": "policy", "prompt": "a b", "max_tokens": 4}
_ROUTING = RequestRouterConfig(
    request_router_class="services.role_router.RoleRouter", request_routing_stats_period_s=0.5
)


@serve.deployment(
    num_replicas=2, max_ongoing_requests=64, ray_actor_options={"num_cpus": 0}, request_router_config=_ROUTING
)
class Door:
    """A replica without an engine; its role is what the file of its name says."""

    def __init__(self, roles: str) -> None:
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._file = Path(roles) / self._name
        self._file.write_text("serving")

    async def record_routing_stats(self) -> dict[str, Any]:
        return {ROLE: self._file.read_text()}

    async def completions(self) -> AsyncIterator[str]:
        if (role := self._file.read_text()) != "serving":
            raise NotServing(self._name, role)
        yield self._name


class Ingress:
    """As Ray Serve LLM's: the first item is there before the answer begins."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def completions(self, body: Any, request: Request) -> Response:
        return JSONResponse([item async for item in self._handle.completions.remote()])

    async def asked(self) -> str:
        response = await EngineBackend(self, {}).completions(BODY, {})  # type: ignore[arg-type]
        return bytes(response.body).decode().strip('[]"')


class Roles:
    """The files of all doors."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        return sorted(file.name for file in self._directory.iterdir())

    def give(self, role: str, *names: str) -> None:
        for name in names:
            (self._directory / name).write_text(role)


async def answered(handle: Any) -> list[str]:
    """By a door that nobody tries again at."""
    return [item async for item in handle.options(stream=True).completions.remote()]


@pytest.fixture
def handle(ray_address: str, tmp_path: Path) -> Iterator[Any]:
    yield serve.run(Door.bind(str(tmp_path)), name="doors", route_prefix=None)
    serve.shutdown()


async def test_a_lent_replica_gets_no_user_and_one_that_is_back_does(handle: Any, tmp_path: Path) -> None:
    ingress, roles = Ingress(handle), Roles(tmp_path)
    one, other = roles.names()
    assert {await ingress.asked() for _ in range(30)} == {one, other}

    roles.give("draining", one)
    assert {await ingress.asked() for _ in range(30)} == {other}
    await asyncio.sleep(2 * STALE_S)
    assert {item for _ in range(30) for item in await answered(handle)} == {other}

    roles.give("serving", one)
    async with asyncio.timeout(30):
        while await ingress.asked() != one:  # noqa: ASYNC110  Serve does not say when it has heard
            await asyncio.sleep(0.01)


async def test_a_refusal_names_who_refused(handle: Any, tmp_path: Path) -> None:
    roles = Roles(tmp_path)
    roles.give("rollout", *roles.names())
    with pytest.raises(RayTaskError) as refused:
        await answered(handle)
    assert isinstance(refused.value.cause, NotServing)
    assert refused.value.cause.replica in roles.names()
