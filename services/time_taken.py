"""Engine time that rollouts took, look by look."""

from bisect import bisect_left

from services.step_cost import Steps

_MOST = 6000
"""Looks that are remembered at least: ten minutes, longer than nearly all answers. Each is two moments at the most."""


class TimeTaken:
    """Since it was begun, at `now`."""

    def __init__(self, now: float) -> None:
        self._moments = [now]
        self._until = [0.0]
        """Seconds until each of them."""
        self._unread_s = 0.0
        """That the prompts take whose steps are still to come."""
        self._runs_s = 0.0
        """Of the step that runs now, at most, as far as it is like those before."""

    def prompts(self, seconds: float) -> None:
        """Of rollouts were begun that take so long."""
        self._unread_s += seconds

    def book(
        self, now: float, steps: Steps, *, users_tokens: int, rollout_s: float, came: float, read: bool = True
    ) -> None:
        """The steps since the look before brought users so many tokens, and each rollout in them took `rollout_s`; all
        of them were rollouts' where the first user who is there `came` after they began. Prompts of rollouts were
        `read` in them, or are still to come.

        >>> taken = TimeTaken(0.0)
        >>> taken.prompts(0.5)
        >>> for look in (1, 2, 3):
        ...     taken.book(look, Steps(4, 0.4, sequences=40, tokens=40), users_tokens=8, rollout_s=0.005, came=0.0)
        >>> [round(taken.between(look - 1, look), 2) for look in (1, 2, 3)]
        [0.4, 0.4, 0.18]
        """
        alone = not users_tokens and came >= now - steps.seconds
        tokens_s = min(steps.seconds, steps.sequences_beside(users_tokens) * rollout_s)
        prompts_s = min(steps.seconds - tokens_s, self._unread_s) if read else 0.0
        self._unread_s -= prompts_s
        self._runs_s = 2 * steps.seconds / steps.count if steps.count else self._runs_s
        self.add(now, steps.seconds if alone else tokens_s + prompts_s, of=steps.seconds)

    def read(self) -> None:
        """All prompts are computed: of some of their tokens the cache knew more than was thought."""
        self._unread_s = 0.0

    def rest(self, now: float, seconds: float) -> None:
        """No rollout had a seat for so long."""
        self.read()
        self.add(now, 0.0, of=seconds)

    def add(self, now: float, seconds: float, *, of: float) -> None:
        """They took so many `of` the seconds of all steps that ended since the look before, or began earlier; a look
        that saw no step end says nothing."""
        if of <= 0.0:
            return
        if now - of > self._moments[-1]:
            self._append(now - of, 0.0)
        self._append(now, min(seconds, now - self._moments[-1]))

    def _append(self, moment: float, seconds: float) -> None:
        self._moments.append(moment)
        self._until.append(self._until[-1] + seconds)
        if len(self._moments) > 4 * _MOST:
            del self._moments[: 2 * _MOST], self._until[: 2 * _MOST]

    def between(self, begin: float, end: float) -> float:
        """Seconds of [begin, end]; those of a look are spread evenly over its steps. The step that runs now goes on as
        they did, for twice as long as one of them and the prompts that are to come: what takes longer is a user's own.

        >>> taken = TimeTaken(0.0)
        >>> for look in range(1, 9):
        ...     taken.add(look, 0.4, of=1.0)
        >>> [round(taken.between(*span), 2) for span in ((3.5, 5.5), (4, 5), (7.5, 8.5), (-1, 1), (9, 10), (5, 4))]
        [0.8, 0.4, 0.2, 0.4, 0.0, 0.0]
        >>> taken.add(20.0, 0.4, of=0.5)
        >>> [round(taken.between(*span), 2) for span in ((9, 19.5), (19.5, 20), (19.75, 20))]
        [0.0, 0.4, 0.2]
        """
        return max(0.0, self._before(end) - self._before(begin))

    def _before(self, moment: float) -> float:
        after = min(bisect_left(self._moments, moment), len(self._moments) - 1)
        if after == 0:
            return self._until[0]
        earlier, later = self._moments[after - 1], self._moments[after]
        moment = min(moment, later + self._runs_s + self._unread_s)
        share = (moment - earlier) / (later - earlier) if later > earlier else 1.0
        return self._until[after - 1] + share * (self._until[after] - self._until[after - 1])
