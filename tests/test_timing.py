"""The step timer on a clock that the tests move by hand."""

import numpy as np
import pytest

from sparse2d.timing import StepTimer


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Training:
    """A timer, its clock, and what was called when."""

    def __init__(self, warmup_steps: int) -> None:
        self.clock = Clock()
        self.events: list[str] = []
        self.timer = StepTimer(warmup_steps, lambda: self._synchronise(), self.clock)

    def _synchronise(self) -> None:
        self.events.append("synchronise")
        self.clock.now += 1000.0

    def step(self, seconds: float, rows: int = 60) -> None:
        with self.timer.step(rows):
            self.events.append("step")
            self.clock.now += seconds

    def evaluate(self, seconds: float) -> None:
        self.clock.now += seconds


def test_qps_is_rows_over_the_seconds_of_steps_after_the_warm_up():
    training = Training(warmup_steps=2)
    for seconds in (50.0, 40.0, 2.0, 3.0, 1.0):
        training.step(seconds)
    assert training.timer.qps == pytest.approx(3 * 60 / 6.0)


def test_each_step_counts_its_own_rows():
    training = Training(warmup_steps=1)
    training.step(1.0, rows=1000)
    training.step(1.0, rows=10)
    training.step(3.0, rows=30)
    assert training.timer.qps == pytest.approx(10.0)


def test_time_between_steps_does_not_count():
    training = Training(warmup_steps=0)
    training.step(2.0)
    training.evaluate(500.0)
    training.step(2.0)
    training.evaluate(500.0)
    assert training.timer.qps == pytest.approx(30.0)
    assert training.timer.percentiles_ms()["p90"] == pytest.approx(2000.0)


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
def test_ranks_are_brought_together_once_and_before_the_clock_starts(warmup_steps):
    training = Training(warmup_steps)
    for _ in range(5):
        training.step(1.0)
    assert training.events == ["step"] * warmup_steps + ["synchronise"] + ["step"] * (5 - warmup_steps)
    assert training.timer.percentiles_ms()["p90"] == pytest.approx(1000.0)


def test_percentiles_are_numpys():
    training = Training(warmup_steps=1)
    seconds = np.random.default_rng(0).uniform(0.01, 2.0, 37)
    training.step(1e6)
    for value in seconds:
        training.step(float(value))
    p10, p50, p90 = np.percentile(seconds * 1e3, [10, 50, 90])
    assert training.timer.percentiles_ms() == pytest.approx({"p10": p10, "p50": p50, "p90": p90})


def test_nothing_is_known_before_the_first_timed_step():
    training = Training(warmup_steps=3)
    for _ in range(3):
        training.step(1.0)
    assert training.timer.qps is None
    assert set(training.timer.percentiles_ms().values()) == {None}
