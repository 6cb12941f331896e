"""In which order an engine serves requests: vLLM takes lower numbers first."""

CANARY = -10
USER = 0
ROLLOUT = 10
"""Left out of steps that compute users' prompts, see `users_first`, and of those without room for it."""
ROLLOUT_BESIDE = 11
"""In every step, as long as there is room in it."""
