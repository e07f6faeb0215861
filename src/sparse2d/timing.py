"""Step times and QPS of the training loop."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
        return percentiles_ms(self._durations_s)


def percentiles_ms(durations_s: Sequence[float]) -> dict[str, float | None]:
    """P10, P50 and P90 in milliseconds; None of nothing."""
    if not durations_s:
        return {"p10": None, "p50": None, "p90": None}
    values = np.percentile(durations_s, [10, 50, 90]) * 1e3
    return dict(zip(("p10", "p50", "p90"), values.tolist(), strict=True))


def slowest(ranks: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The largest of each percentile among those of all ranks, which are None on all or on none."""
    return {
        name: None if value is None else max(rank[name] or 0.0 for rank in ranks) for name, value in ranks[0].items()
    }


def phases_told(train: Mapping[str, Any]) -> str | None:
    """One line on where a step's time went; None if phases were not timed.

    Args:
        train: that part of a run's record.
    """
    phases = {name: of["slowest"]["mean"] for name, of in train.get("phases_ms", {}).items()}
    shown = [f"{name} {ms:.3g}" for name, ms in phases.items() if ms]
    return f"ms of a step, mean on the slowest rank: {', '.join(shown)}" if shown else None
