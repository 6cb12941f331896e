"""The gateway keeps to its own OpenAPI document, whatever is sent."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from services.gateway_app import build_app
from tests.unit.gateway_kit import ADMIN, bearer, kit

REFUSALS = ["400", "401", "404", "413", "415", "422"]
"""A generated body can also be too large, which is as good a reason."""
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}})
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", build_app(kit().parts), config=CONFIG, headers=bearer(ADMIN))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    allow_header_conformance,
    ignored_auth,
]


@SCHEMA.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_documented_and_bad_input_is_refused(case: schemathesis.Case) -> None:
    if "wait_s" in (case.query or {}):
        case.query["wait_s"] = 0.01
    case.call_and_validate(headers=bearer(ADMIN), checks=CHECKS)
