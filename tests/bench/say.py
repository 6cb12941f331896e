"""Lines of progress of a long run."""

import time


def say(text: str) -> None:
    """With the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
