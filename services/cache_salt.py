"""What keeps the computed prefixes of one set of weights apart from those of another, in vLLM's prefix cache."""

import hashlib


def salted(loads: int, salt: str | None = None) -> str:
    """The salt of a request that is computed after so many loads of weights; `salt` is its own.

    One that a user chose is hashed, so that it stays within vLLM's 128 characters and is nobody else's salt.

    >>> salted(3), salted(3, "mine")[:8]
    ('3', '2c75e1cb')
    """
    return str(loads) if salt is None else hashlib.sha256(f"{loads}:{salt}".encode(errors="surrogatepass")).hexdigest()
