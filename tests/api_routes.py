"""Every route of the API that asks for a token, with the roles that may."""

EVERYDAY = frozenset({"user", "rollout", "admin"})
ROLLOUTS = frozenset({"rollout", "admin"})
ROUTES = (
    ("GET", "/v1/models", EVERYDAY),
    ("GET", "/v1/models/policy", EVERYDAY),
    ("POST", "/v1/completions", EVERYDAY),
    ("POST", "/v1/chat/completions", EVERYDAY),
    ("POST", "/v1/rollouts", ROLLOUTS),
    ("GET", "/v1/rollouts/default~0", ROLLOUTS),
    ("GET", "/v1/rollouts/default~0/samples", ROLLOUTS),
    ("DELETE", "/v1/rollouts/default~0", ROLLOUTS),
    ("GET", "/v1/status", frozenset({"admin"})),
    ("GET", "/metrics", frozenset({"admin", "metrics"})),
)
"""With a model and a rollout in the place of the path's parameters."""


def documented() -> set[tuple[str, str]]:
    """The same as the OpenAPI document names them."""
    names = {"default~0": "{rollout_id}", "models/policy": "models/{model}"}
    found = set()
    for method, path, _ in ROUTES:
        for value, name in names.items():
            path = path.replace(value, name)  # noqa: PLW2901
        found.add((method, path))
    return found
