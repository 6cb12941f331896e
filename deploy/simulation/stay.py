"""How long users stay in a replica, and how many of them are there, by mean steps."""

from deploy.simulation.scene import Scene

_ROUNDS = 64


def held_by_users(scene: Scene, rate: float, prompt: float, tokens: float) -> float:
    """Users in the replica, by Little's law with the time that steps of so many take; those beyond its seats wait for
    one."""
    model, seats = scene.model, float(scene.options.engine.max_num_seqs)
    held = 0.0
    for _ in range(_ROUNDS):
        step_s = model.step_s(0, held) * (1 + model.prefill_token_s * prompt * rate)
        held = min(seats, rate * (prompt * model.prefill_token_s + tokens * step_s))
    return held


def longest_s(scene: Scene, prompt: float, tokens: float) -> float:
    """Seconds that an answer takes whose steps are full, from the first prompt token to the last one."""
    return scene.model.prefill_token_s * prompt + tokens * full_s(scene)


def full_s(scene: Scene) -> float:
    """Seconds of a step with all seats taken, by whoever takes longer."""
    seats = scene.options.engine.max_num_seqs
    return max(scene.model.step_s(seats), scene.model.step_s(0, seats))
