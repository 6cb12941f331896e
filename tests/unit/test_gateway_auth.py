"""Who may use which route, and when the gateway refuses to start."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import SecretStr

from rollout.errors import ConfigError
from services.auth import Doorkeeper, Role, check_exposure, deployed_tokens, fleet_args, resolve_tokens, without_tokens
from services.config import AuthConfig, FleetConfig, GatewayConfig
from services.gateway_app import build_app
from services.token_strength import weakness
from tests.api_routes import ROUTES, documented
from tests.unit.gateway_kit import ADMIN, METRICS, ROLLOUT, USER, bearer, fleet, kit

OPEN = {("GET", "/healthz"), ("HEAD", "/healthz")}
STRONG = ("f1d2d2f924e986ac86fdf7b3", "Wp0o9dVRgxXq_lBq6Sk2", "correct horse battery staple 7")
TOKENS = {Role.USER: USER, Role.ROLLOUT: ROLLOUT, Role.ADMIN: ADMIN, Role.METRICS: METRICS}


def client(config: FleetConfig | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(kit(config).parts)), base_url="http://gateway")


def test_the_matrix_names_every_route_there_is() -> None:
    app = build_app(kit().parts)
    paths = app.openapi()["paths"]
    there_are = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert there_are == documented() | {("GET", "/healthz")}
    unlisted = {
        getattr(route, "path", str(route)) for route in app.routes if not getattr(route, "include_in_schema", 0)
    }
    assert unlisted == {"/openapi.json", "/healthz"}  # its HEAD


@pytest.mark.parametrize(("method", "path", "able"), ROUTES)
async def test_every_route_asks_for_its_role(method: str, path: str, able: frozenset[str]) -> None:
    async with client() as http:
        for headers in ({}, bearer(""), {"Authorization": f"Basic {ADMIN}"}, {"Authorization": ADMIN}):
            answer = await http.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        for wrong in ("nonsense", ADMIN[:-1], ADMIN + "x", "None", "**********"):
            assert (await http.request(method, path, headers=bearer(wrong))).status_code == 401
        for role, token in TOKENS.items():
            answer = await http.request(method, path, headers=bearer(token))
            assert (answer.status_code == 403) == (role not in able)
            assert answer.status_code != 401
            if role not in able:
                message = answer.json()["error"]["message"]
                assert f"the token has {role}" in message
                assert {word for word in Role if word in message.partition(" role")[0].split()} == able


async def test_whatever_the_app_routes_wants_a_token_but_health() -> None:
    app = build_app(kit().parts)
    routes = [(method, path) for route in app.routes for method, path in _ways(route)]
    assert {path for _, path in routes} > {path for _, path in OPEN} | {"/openapi.json"}
    async with client() as http:
        for method, path in routes:
            status = (await http.request(method, path)).status_code
            assert status == (200 if (method, path) in OPEN else 401), (method, path)


def _ways(route: Any) -> Iterator[tuple[str, str]]:
    """With a text in the place of each of the path's parameters."""
    for method in route.methods:
        yield method, re.sub(r"\{[^}]*\}", "default~0", route.path)


async def test_the_document_is_for_who_may_use_the_api_and_no_page_runs_scripts_beside_it() -> None:
    async with client() as http:
        for role, token in TOKENS.items():
            status = (await http.get("/openapi.json", headers=bearer(token))).status_code
            assert status == (403 if role is Role.METRICS else 200)
        assert (await http.get("/docs", headers=bearer(ADMIN))).status_code == 404


@pytest.mark.parametrize(("method", "path", "able"), ROUTES)
async def test_a_role_without_token_is_granted_to_nobody(method: str, path: str, able: frozenset[str]) -> None:
    bare = fleet()
    bare = bare.model_copy(update={"gateway": bare.gateway.model_copy(update={"auth": AuthConfig()})})
    async with client(bare) as http:
        for token in (*TOKENS.values(), "None"):
            assert (await http.request(method, path, headers=bearer(token))).status_code == 401


def test_the_document_names_the_role_of_scrapers() -> None:
    schemes = build_app(kit().parts).openapi()["components"]["securitySchemes"]
    assert "metrics role" in schemes["bearer"]["description"]


async def test_no_page_of_another_origin_is_invited() -> None:
    async with client() as http:
        answer = await http.get("/v1/models", headers={**bearer(USER), "Origin": "http://elsewhere"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("token", ["", " ", "**********", "tok\nen", " padded "])
def test_tokens_that_cannot_be_meant_are_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.auth\.rollout"):
        Doorkeeper(AuthConfig(rollout=SecretStr(token)))


def test_one_token_cannot_have_two_roles() -> None:
    with pytest.raises(ConfigError, match="equals the token of another role"):
        Doorkeeper(AuthConfig(user=SecretStr("same"), admin=SecretStr("same")))


def test_tokens_come_from_the_environment_where_the_config_has_none() -> None:
    environ = {"NIGHTSHIFT_USER_TOKEN": "from-env", "NIGHTSHIFT_ADMIN_TOKEN": "from-env-2"}
    auth = resolve_tokens(AuthConfig(admin=SecretStr("from-config")), environ)
    assert auth.user is not None
    assert auth.admin is not None
    assert (auth.user.get_secret_value(), auth.rollout) == ("from-env", None)
    assert auth.admin.get_secret_value() == "from-config"


@pytest.mark.parametrize("exposed", [True, False])
def test_a_deployment_without_any_token_is_refused_with_the_remedy(*, exposed: bool) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.auth\.file.*NIGHTSHIFT_USER_TOKEN.*ray start"):
        deployed_tokens(AuthConfig(), {"NIGHTSHIFT_USER_TOKEN": ""}, exposed=exposed)


def test_one_token_is_enough_for_a_deployment() -> None:
    auth = deployed_tokens(AuthConfig(), {"NIGHTSHIFT_ROLLOUT_TOKEN": STRONG[0]}, exposed=True)
    assert Doorkeeper(auth).role(STRONG[0]) is Role.ROLLOUT
    with pytest.raises(ConfigError, match=r"gateway\.auth\.user"):
        deployed_tokens(AuthConfig(user=SecretStr(" padded ")), {}, exposed=False)


def test_a_deployment_takes_no_token_that_can_be_guessed_unless_it_is_on_loopback() -> None:
    environ = {"NIGHTSHIFT_ADMIN_TOKEN": "changeme"}
    with pytest.raises(
        ConfigError, match=r"gateway\.auth\.admin \(NIGHTSHIFT_ADMIN_TOKEN\) is shorter than 16"
    ) as said:
        deployed_tokens(AuthConfig(user=SecretStr(STRONG[0])), environ, exposed=True)
    assert "changeme" not in str(said.value)
    assert Doorkeeper(deployed_tokens(AuthConfig(), environ, exposed=False)).role("changeme") is Role.ADMIN


def test_tokens_survive_the_trip_as_plain_arguments_and_are_shown_nowhere_else() -> None:
    config = fleet()
    assert FleetConfig.model_validate(fleet_args(config)) == config
    for token in TOKENS.values():
        assert token not in repr(config) + str(config) + config.model_dump_json()
    assert without_tokens(config).gateway.auth == AuthConfig()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_chosen_tokens(host: str) -> None:
    check_exposure(GatewayConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "gpu-node", ""])
def test_another_address_needs_the_tokens_that_reach_an_engine(host: str) -> None:
    two = AuthConfig(user=SecretStr(STRONG[0]), rollout=SecretStr(STRONG[1]))
    with pytest.raises(ConfigError, match="NIGHTSHIFT_ADMIN_TOKEN"):
        check_exposure(GatewayConfig(host=host, auth=two))
    check_exposure(GatewayConfig(host=host, auth=two.model_copy(update={"admin": SecretStr(STRONG[2])})))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "gpu-node"])
@pytest.mark.parametrize("role", ["user", "rollout", "admin"])
def test_another_address_takes_no_token_that_can_be_guessed(host: str, role: str) -> None:
    tokens = dict(zip(("user", "rollout", "admin"), map(SecretStr, STRONG), strict=True))
    weak = AuthConfig(**{**tokens, role: SecretStr("hunter2")})
    with pytest.raises(ConfigError, match=rf"gateway\.auth\.{role} .*shorter than 16.*gateway\.host={host}") as said:
        check_exposure(GatewayConfig(host=host, auth=weak))
    assert "hunter2" not in str(said.value)
    check_exposure(GatewayConfig(host="127.0.0.1", auth=weak))


@pytest.mark.parametrize(
    ("token", "what"),
    [
        ("", "shorter than 16"),
        ("a", "shorter than 16"),
        ("Tr0ub4dor&3-xyz", "shorter than 16"),
        ("x" * 40, "fewer than 6 different"),
        ("ababababcdcdcdcdeeee", "fewer than 6 different"),
        *(
            (token, "is a placeholder")
            for token in (
                "changeme-changeme",
                "ChangeMeChangeMe",
                "your-token-here-please",
                "YOUR_SECRET_TOKEN",
                "<your admin token>",
                "${NIGHTSHIFT_USER_TOKEN}",
                "$NIGHTSHIFT_USER_TOKEN",
                "{{ gateway.user_token }}",
                "%NIGHTSHIFT_TOKEN%",
                "[insert your token]",
                "replace-this-token",
                "nightshift-admin-token",
                "user-token-12345",
                "password12345678",
                "secret-secret-00000",
                "0123456789abcdef",
                "abcdefghijklmnop",
                "qwertyuiopasdfgh",
                "1234567890123456",
                "my-secret-token...",
            )
        ),
    ],
)
def test_a_token_that_can_be_guessed_is_told_by_the_rule_that_it_breaks(token: str, what: str) -> None:
    found = weakness(token)
    assert found is not None
    assert what in found
    assert len(token) < 3 or token not in found


@given(st.binary(min_size=12, max_size=48))
def test_made_and_random_tokens_pass(noise: bytes) -> None:
    assume(len(set(noise)) > 10)
    for token in (noise.hex(), base64.urlsafe_b64encode(noise).decode(), f"ns-user-{base64.b32encode(noise).decode()}"):
        assert weakness(token) is None
    assert all(weakness(token) is None for token in STRONG)
