"""How the processes of a fleet log: plain lines, for files."""

import structlog


def plain_logs() -> None:
    """Tracebacks without colours and local variables: drawing those holds up an event loop for seconds, and what users
    send is in them.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
