"""The deployment file that users copy is a valid configuration."""

from pathlib import Path

import yaml

from services.config import FleetConfig

SERVE_YAML = Path(__file__).parents[2] / "deploy" / "serve.yaml"


def test_serve_yaml_is_a_valid_fleet_configuration() -> None:
    (application,) = yaml.safe_load(SERVE_YAML.read_text())["applications"]
    assert application["import_path"] == "services.app:build"
    fleet = FleetConfig.model_validate(application["args"])
    assert fleet.redis.url is not None
