"""Step times and QPS of the training loop."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class StepTimer:
    """Times training steps after a warm-up; evaluation and logging between steps do not count.

    Args:
        warmup_steps: steps that are not timed.
        synchronise: called once before the clock starts and must bring all ranks together (a barrier).
        clock: seconds, monotonic.
    """

    def __init__(
        self, warmup_steps: int, synchronise: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._warmup_steps = warmup_steps
        self._synchronise = synchronise
        self._clock = clock
        self._seen = 0
        self._durations_s: list[float] = []
        self._rows = 0

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Time one step that trains on ``rows`` rows of the global batch."""
        if self._seen == self._warmup_steps:
            self._synchronise()
        start = self._clock()
        yield
        if self._seen >= self._warmup_steps:
            self._durations_s.append(self._clock() - start)
            self._rows += rows
        self._seen += 1

    @property
    def qps(self) -> float | None:
        """Rows of all ranks per second of timed steps; None before the first one."""
        total = sum(self._durations_s)
        return self._rows / total if total > 0 else None

    def percentiles_ms(self) -> dict[str, float | None]:
        """P10, P50 and P90 of this rank's step times in milliseconds."""
        if not self._durations_s:
            return {"p10": None, "p50": None, "p90": None}
        values = np.percentile(self._durations_s, [10, 50, 90]) * 1e3
        return dict(zip(("p10", "p50", "p90"), values.tolist(), strict=True))
