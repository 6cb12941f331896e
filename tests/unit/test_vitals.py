"""Whether an engine lives: steps and probes count, queues do not."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.config import HealthConfig
from services.vitals import Look, Pulse, Verdict, first_pulse, follow, judge, probe_due

CONFIG = HealthConfig(look_s=1, probe_s=5, suspect_s=4, dead_s=10)


@dataclass
class Watch:
    """Looks once a second at an engine that does what the test says, and sends the probes that are due."""

    pulse: Pulse
    verdicts: list[Verdict]
    probes: int = 0

    @classmethod
    def begin(cls) -> "Watch":
        return cls(first_pulse(Look(at=0.0, steps=0, busy=False, paused=False)), [])

    def look(
        self, *, busy: bool, steps: int = 0, answers: bool = False, fails: bool = False, **seen: object
    ) -> Verdict:
        """After another second in which the engine took `steps`, and answered or failed a probe if it had one."""
        before = self.pulse.look
        asked = before.probing or probe_due(self.pulse, CONFIG)
        self.probes += asked and not before.probing
        now = Look(
            at=before.at + 1.0,
            steps=before.steps + steps + (asked and (answers or fails)),
            busy=busy,
            paused=False,
            probing=asked and not (answers or fails),
            answered=before.answered + (asked and answers),
            failed=before.failed + (asked and fails),
        )
        self.pulse = follow(self.pulse, replace(now, **seen), CONFIG)
        self.verdicts.append(judge(self.pulse, CONFIG))
        return self.verdicts[-1]


BOUND = int(CONFIG.probe_s + CONFIG.dead_s) + 3


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_a_full_engine_that_steps_lives_and_is_never_probed(steps: list[int]) -> None:
    watch = Watch.begin()
    for count in steps:
        assert watch.look(busy=True, steps=count) is Verdict.ALIVE
    assert watch.probes == 0


@given(st.lists(st.booleans(), min_size=60, max_size=60))
def test_an_engine_that_hangs_is_found_out_whoever_gives_up_waiting_for_it(busy: list[bool]) -> None:
    watch = Watch.begin()
    for is_busy in busy[:BOUND]:
        watch.look(busy=is_busy)
    assert watch.verdicts[-1] is Verdict.LOST
    assert Verdict.SILENT in watch.verdicts


def test_an_engine_with_work_is_suspected_and_given_up_in_time() -> None:
    watch = Watch.begin()
    watch.look(busy=True)
    verdicts = [watch.look(busy=True) for _ in range(10)]
    assert verdicts == [Verdict.ALIVE] * 3 + [Verdict.SILENT] * 6 + [Verdict.LOST]


@given(st.integers(1, 100))
def test_an_idle_engine_that_answers_its_probes_lives(looks: int) -> None:
    watch = Watch.begin()
    assert {watch.look(busy=False, answers=True) for _ in range(looks)} == {Verdict.ALIVE}
    assert watch.probes <= looks / CONFIG.probe_s


@pytest.mark.parametrize("fails", [True, False])
def test_an_idle_engine_whose_probes_bring_no_token_is_given_up(fails: bool) -> None:
    watch = Watch.begin()
    for _ in range(BOUND):
        watch.look(busy=False, fails=fails)
    assert watch.verdicts[-1] is Verdict.LOST


def test_steps_that_bring_a_lone_probe_no_token_are_no_life() -> None:
    watch = Watch.begin()
    for _ in range(BOUND):
        watch.look(busy=False, steps=3 if watch.pulse.look.probing else 0)
    assert watch.verdicts[-1] is Verdict.LOST


def test_one_step_clears_a_suspect() -> None:
    watch = Watch.begin()
    for _ in range(8):
        watch.look(busy=True)
    assert watch.verdicts[-1] is Verdict.SILENT
    assert watch.look(busy=True, steps=1) is Verdict.ALIVE
    assert watch.pulse.silent_s == 0


def test_a_suspect_that_has_lost_its_users_is_probed_at_once() -> None:
    watch = Watch.begin()
    for _ in range(6):
        watch.look(busy=True)
    assert watch.look(busy=False) is Verdict.SILENT
    assert watch.look(busy=False, answers=True) is Verdict.ALIVE
    assert watch.probes == 1


@given(st.integers(1, 200))
def test_a_pause_is_left_to_its_watchdog(looks: int) -> None:
    watch = Watch.begin()
    watch.look(busy=True, steps=1)
    assert {watch.look(busy=True, paused=True) for _ in range(looks)} == {Verdict.WATCHED}
    assert watch.look(busy=True) is Verdict.ALIVE
    assert watch.pulse.silent_s == 0


@given(st.floats(1.0, 1e6))
def test_time_in_which_nobody_looked_is_not_held_against_the_engine(away_s: float) -> None:
    pulse = first_pulse(Look(at=0.0, steps=0, busy=True, paused=False))
    pulse = follow(pulse, Look(at=away_s, steps=0, busy=True, paused=False), CONFIG)
    assert pulse.silent_s <= 2 * CONFIG.look_s
    assert judge(pulse, CONFIG) is Verdict.ALIVE


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"suspect_s": 60.0, "dead_s": 60.0}, "suspect_s=60.0 is not below dead_s=60.0"),
        ({"look_s": 4.0, "suspect_s": 5.0}, "suspect_s=5.0 is less than two looks of look_s=4.0"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(settings: dict[str, float], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        HealthConfig(**settings)
