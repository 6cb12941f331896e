"""Whether a token can be guessed, for gateways that other machines reach."""

import re

MIN_CHARS = 16
MIN_DIFFERENT = 6
_WORDS = (
    *(
        "access",
        "admin",
        "api",
        "auth",
        "bar",
        "bearer",
        "change",
        "default",
        "dummy",
        "example",
        "fill",
        "foo",
        "here",
    ),
    *(
        "in",
        "insert",
        "key",
        "longer",
        "me",
        "my",
        "nightshift",
        "passphrase",
        "passwd",
        "password",
        "place",
        "placeholder",
    ),
    *("please", "replace", "rollout", "sample", "secret", "set", "test", "the", "this", "to", "todo", "token", "user"),
    *("value", "with", "xxx", "your"),
)
_FROM_WORDS = re.compile(f"(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})*")
_TEMPLATE = re.compile(r"<.*>|\[.*\]|\{.*\}|\$.*|%.*%|.*\.\.\.")
"""What a file is delivered with, or what a variable leaves that nobody filled in."""
_ROWS = ("abcdefghijklmnopqrstuvwxyz", "qwertyuiopasdfghjklzxcvbnm")
_COUNTING = "01234567890123456789012345678901234567890"


def weakness(token: str) -> str | None:
    """What is wrong with it, without repeating any of it; None for one that is not guessed.

    >>> weakness("changeme"), weakness("aaaaaaaaaaaaaaaaaaaa"), weakness("your-secret-token-123")
    ('is shorter than 16 characters', 'has fewer than 6 different characters', 'is a placeholder')
    """
    if len(token) < MIN_CHARS:
        return f"is shorter than {MIN_CHARS} characters"
    if len(set(token)) < MIN_DIFFERENT:
        return f"has fewer than {MIN_DIFFERENT} different characters"
    return "is a placeholder" if _TEMPLATE.fullmatch(token) or _is_common(token.casefold()) else None


def _is_common(token: str) -> bool:
    """Made of words that stand for a token, of rows of keys and of counting, and of nothing else."""
    letters, digits = re.sub(r"[^a-z]", "", token), re.sub(r"[^0-9]", "", token)
    listed = _FROM_WORDS.fullmatch(letters) is not None or any(letters in row + row for row in _ROWS)
    return listed and (digits in _COUNTING or digits in _COUNTING[::-1] or len(set(digits)) == 1)
