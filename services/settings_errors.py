"""What is wrong with settings that were given, in a line that may be logged and shown."""

from pydantic import ValidationError


def described(error: ValidationError, *, whole: str = "args") -> str:
    """The first thing wrong, without what was given: it may hold tokens or a password, and Serve logs the message.
    `whole` names the settings where none of them alone is wrong."""
    first = error.errors(include_input=False, include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    return f"{field}: {first['msg'].removeprefix('Value error, ')}"
