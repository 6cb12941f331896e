"""vLLM's scheduler, which leaves rollouts out of the steps that compute users' prompts, and out of the others those who
are too many beside the users of the moment; for the engine's process.

Without that a user who finds an engine full of rollouts shares the step of the first token with all of them, and users
who come at once share all steps with them until the guard has looked.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from services.first_token_turns import STEPS, FirstTokenTurns
from services.patient_reads import read_patiently
from services.priorities import ROLLOUT, USER
from services.step_room import found_room


class _UsersFirst(Scheduler):  # type: ignore[misc]
    """Rollouts keep their seats and what is computed of them, and get no token in such a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = FirstTokenTurns(most=int(self.vllm_config.additional_config[STEPS]))
        self._alone = False
        self._room = found_room(os.environ)
        self._free = 0
        """Rollouts that the step has room for beyond those that run."""
        self._most_empty = max(2, int(self.vllm_config.parallel_config.pipeline_parallel_size))
        """Steps in a row: with a pipeline one user's have others between them that are nobody's."""
        self._empty = 0
        """Steps in a row that had nobody: rollouts that wait do not help users who wait for what those hold."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        awaited = self._awaited()
        self._alone = self._turns.next(awaited=bool(awaited))
        rollouts = [request for request in self.running if _is_rollout(request)]
        room = None if self._empty >= self._most_empty else self._room.rollouts(self._users())
        for request in self._left_out(rollouts, room):
            # counted up before it is compared; later where a pipeline has not its token yet
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        self._free = sys.maxsize if room is None else room - len(rollouts)
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            self._empty = 0
        elif self.pause_state == PauseState.UNPAUSED:
            self._empty += 1
        self._room.stepped(waiting=next(self._beginnable(), None) is not None)
        if self._alone and not awaited & output.num_scheduled_tokens.keys():
            self._turns.in_vain()
        return output

    def _left_out(self, rollouts: Sequence[Request], room: int | None) -> list[Request]:
        """Of the step; who was let in first has the room, so that they end."""
        aside = [request for request in rollouts if self._alone and _gives_way(request)]
        return aside if room is None else [*aside, *rollouts[room:]]

    def _users(self) -> int:
        """In the step: those who run, and those who wait and can be begun, as far as there are seats."""
        free = max(0, self.max_num_active_reqs - len(self.running))
        return sum(map(_comes_first, self.running)) + sum(1 for _ in islice(self._beginnable(), free))

    def _beginnable(self) -> Iterator[Request]:
        """Those who come first and wait, next one first, but not who waits for a grammar, or for keys and values from
        elsewhere: rollouts have nothing that would help."""
        following = takewhile(_comes_first, self.waiting) if self.waiting else ()
        return (request for request in following if not self._is_blocked_waiting_status(request.status))

    def _awaited(self) -> set[str]:
        """Requests that come first and have not all of their prompt computed: those in the engine, and the next one if
        it finds a seat."""
        awaited = {request.request_id for request in self.running if _comes_first(request) and _in_prompt(request)}
        free = max(0, min(1, self.max_num_active_reqs - len(self.running)))
        return awaited | {request.request_id for request in islice(self._beginnable(), free)}

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not _is_rollout(request):
            return bool(super()._handle_blocked_waiting_request(request))
        if self._free <= 0 or (self._alone and _gives_way(request)):
            return False
        if not super()._handle_blocked_waiting_request(request):
            return False
        self._free -= 1
        return True


class _AsyncUsersFirst(_UsersFirst, AsyncScheduler):  # type: ignore[misc]
    pass


def users_first(*, vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """What vLLM calls for its scheduler, of the kind that it would take itself; the way into the engine's process."""
    read_patiently()
    kind = _AsyncUsersFirst if vllm_config.scheduler_config.async_scheduling else _UsersFirst
    return kind(vllm_config=vllm_config, **arguments)


def _is_rollout(request: Request) -> bool:
    return bool(request.priority >= ROLLOUT)


def _gives_way(request: Request) -> bool:
    return bool(request.priority == ROLLOUT)


def _comes_first(request: Request) -> bool:
    """A user's, or a canary, which users would otherwise wait for together with rollouts."""
    return bool(request.priority <= USER)


def _in_prompt(request: Request) -> bool:
    return bool(request.num_computed_tokens < request.num_prompt_tokens)
