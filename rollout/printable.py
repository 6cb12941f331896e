"""Text that others wrote, for a terminal."""


def printable(text: str) -> str:
    """In one line that moves no cursor and is UTF-8, whatever it held: what is not printable in its backslash form.

    >>> print(printable("naïve\\x1b[2J\\nof two lines \\udcff"))
    naïve\\x1b[2J\\nof two lines \\udcff
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
