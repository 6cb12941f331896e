"""The deployment file that users copy is a valid configuration."""

import ast
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from deploy.local import _ENVIRONMENT
from services.auth import ENVIRONMENT
from services.config import FleetConfig
from services.proxy_limits import CALLBACK, CALLBACK_VARIABLE, VARIABLE

SERVE_YAML = Path(__file__).parents[2] / "deploy" / "serve.yaml"


def test_serve_yaml_is_a_valid_fleet_configuration() -> None:
    (application,) = yaml.safe_load(SERVE_YAML.read_text())["applications"]
    assert application["import_path"] == "services.app:build"
    source = ast.parse((SERVE_YAML.parents[1] / "services" / "app.py").read_text())
    (build,) = (part for part in source.body if isinstance(part, ast.FunctionDef) and part.name == "build")
    assert ast.unparse(build.args) == "args: dict[str, Any]"  # Serve takes no builder of more than one parameter
    fleet = FleetConfig.model_validate(application["args"])
    assert fleet.redis.url is not None


def test_serve_yaml_goes_with_the_defaults_of_ray_start() -> None:
    (application,) = yaml.safe_load(SERVE_YAML.read_text())["applications"]
    gcs_of_ray_start = 6379
    assert urlsplit(application["args"]["redis"]["url"]).port not in {None, gcs_of_ray_start}


def test_serve_yaml_names_what_the_environment_of_ray_start_must_hold() -> None:
    header = SERVE_YAML.read_text().partition("proxy_location")[0]
    for name in ("RAY_process_group_cleanup_enabled", "RAY_worker_niceness"):
        assert f"export {name}={_ENVIRONMENT[name]}\n" in header
    assert f"export {CALLBACK_VARIABLE}={CALLBACK}\n" in header
    for name in (*ENVIRONMENT.values(), VARIABLE):
        assert f"{name}=" in header
