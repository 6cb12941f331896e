"""Users' sequences that got their last token: the guard asks for the newest ten times a second, the door for those of a
request. Answers of a token or two are never seen in the engine."""

from collections import deque

from services.user_window import RequestTimes

_MOST = 4096
"""Of those nobody asked for."""
_REQUESTS = 512
"""That are remembered, for the few milliseconds until an answer has left."""


class Ended:
    """Of one engine."""

    def __init__(self) -> None:
        self._newest: deque[RequestTimes] = deque(maxlen=_MOST)
        self._by_request: dict[str, list[RequestTimes]] = {}

    def add(self, times: RequestTimes) -> None:
        self._newest.append(times)
        self._by_request.setdefault(times.request, []).append(times)
        while len(self._by_request) > _REQUESTS:
            del self._by_request[next(iter(self._by_request))]

    def take(self) -> list[RequestTimes]:
        """Those since it was asked before."""
        taken = list(self._newest)
        self._newest.clear()
        return taken

    def of(self, request_id: str) -> list[RequestTimes]:
        """The sequences of a request. OpenAI routes put words of their own around its id."""
        return [times for name, ended in self._by_request.items() if request_id in name for times in ended]
