"""What is measured of training steps, and the parts of the record that come of it."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from sparse2d.config import EngineKind, Timing, TrainConfig
from sparse2d.data.atomic import replacing
from sparse2d.engine import Engine
from sparse2d.phases import Phase, PhaseClock, watching
from sparse2d.pipeline import TrainSteps
from sparse2d.records import peak_rss_bytes
from sparse2d.testbed.counters import LinkCounters
from sparse2d.timing import StepTimer, percentiles_ms, slowest
from sparse2d.wire import WireCounter, mean_and_max, wire_record

PROFILED_STEPS = 5
# Bytes are counted in so many steps, and intervals between averagings, at the start: they hardly change after that,
# and each collective that the counter hooks takes some 30 microseconds longer, of steps of a few milliseconds.
COUNTED_STEPS, COUNTED_INTERVALS = 20, 4


class Measuring:
    """Step times, and bytes on the wire of the first steps, always; phases and a trace, if asked for.

    A context around training.

    Args:
        engine: that is trained.
        config: says what to measure.
        traces: folder for the traces of all ranks.
    """

    def __init__(self, engine: Engine, config: TrainConfig, traces: Path) -> None:
        self._engine = engine
        self._traces = traces
        self._wire = WireCounter()
        self._hooks = ExitStack()
        # With compression no two steps need be alike.
        is_steady = not config.compression.is_on
        self._counted_steps = max(COUNTED_STEPS, COUNTED_INTERVALS * config.sync.interval) if is_steady else math.inf
        # Steps and averagings that were counted.
        self._counted = (0, 0)
        self._links = LinkCounters()
        # Kernels are only queued when a call returns; a clock that did not wait for them would miss most of them.
        self._synchronise = partial(torch.cuda.synchronize, engine.device) if engine.device.type == "cuda" else None
        self._phases = PhaseClock(self._synchronise) if config.timing is Timing.phases else None
        self._profiles = config.profile
        self._is_emulated = config.engine is EngineKind.emulated
        self._profiler: profile | None = None
        self._warmup_steps = 0
        self._steps = 0
        self._stack = ExitStack()

    def __enter__(self) -> "Measuring":
        self._stack.enter_context(self._hooks).enter_context(self._wire)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin(self, train_steps: TrainSteps, warmup_steps: int) -> None:
        """Call before the first step.

        Args:
            train_steps: what runs the steps.
            warmup_steps: that are not timed.
        """
        self._warmup_steps = warmup_steps
        if self._engine.averager is not None:
            self._engine.averager.after_step = self._wire.averaging(self._engine.averager.after_step)  # type: ignore[method-assign]
        self._timer = StepTimer(warmup_steps, synchronise=self._links.read)
        if self._phases is not None:
            self._stack.enter_context(watching(self._engine, train_steps, self._phases))
        if self._profiles:
            self._traces.mkdir(exist_ok=True)
            self._profiler = self._stack.enter_context(
                profile(
                    activities=[ProfilerActivity.CPU]
                    + ([ProfilerActivity.CUDA] if self._synchronise is not None else []),
                    # The profiler itself warms up in the step before.
                    schedule=schedule(wait=max(warmup_steps - 1, 0), warmup=1, active=PROFILED_STEPS, repeat=1),
                    on_trace_ready=self._write_trace,
                )
            )

    def _write_trace(self, profiler: profile) -> None:
        with replacing(self._traces / f"rank-{dist.get_rank()}.json") as temporary:
            profiler.export_chrome_trace(str(temporary))

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Measure one step that trains on ``rows`` rows of the global batch."""
        with ExitStack() as stack:
            stack.enter_context(self._timer.step(rows))
            if self._phases is not None:
                stack.enter_context(self._phases.step())
            stack.enter_context(self._wire.counting())
            yield
            if self._synchronise is not None:
                self._synchronise()
        self._steps += 1
        if self._steps <= self._counted_steps:
            self._counted = (self._steps, len(self._engine.averager.durations_s) if self._engine.averager else 0)
        if self._steps == self._counted_steps:
            self._hooks.close()
        if self._profiler is not None:
            self._profiler.step()

    @property
    def qps(self) -> float | None:
        """Rows of all ranks per second of timed steps, on this rank's clock; None before the first one."""
        return self._timer.qps

    def point(self) -> dict[str, float | None]:
        """What is measured so far, for the log: rates and memory of this rank, without a collective."""
        sent = sum(self._wire.sent_bytes.values()) / max(self._counted[0], 1)
        cuda = torch.cuda.max_memory_allocated(self._engine.device) if self._engine.device.type == "cuda" else None
        return {
            "qps": self.qps,
            "rank0/sent_bytes_per_step": None if self._is_emulated else sent,
            "rank0/peak_rss_bytes": peak_rss_bytes(),
        } | ({} if cuda is None else {"rank0/peak_cuda_bytes": cuda})

    def train_record(self) -> dict[str, Any]:
        """QPS of the slowest rank; P10, P50 and P90 of steps, and of phases if timed, with means; a collective."""
        self._links.read()
        phases = {}
        if self._phases is not None:
            timed = self._phases.steps[self._warmup_steps :]
            phases = {phase.name: _percentiles_and_mean([step[phase] for step in timed]) for phase in Phase}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.qps, self._timer.percentiles_ms(), phases))
        qps, steps, phases_of_ranks = zip(*ranks, strict=True)
        record = {
            "qps": None if self.qps is None else min(qps),
            "step_ms": slowest(steps),
            "step_ms_per_rank": list(steps),
        }
        if phases:
            record["phases_ms"] = {
                phase: {"slowest": slowest(of_ranks), "per_rank": of_ranks}
                for phase in phases
                for of_ranks in [[of[phase] for of in phases_of_ranks]]
            }
        return record

    def comms_record(self) -> dict[str, Any]:
        """Bytes on the wire, mean and maximum over the ranks, and the cost of averaging; a collective."""
        averager = self._engine.averager
        durations = averager.durations_s if averager is not None else []
        payloads = averager.payloads_bytes if averager is not None else []
        sent = wire_record(self._wire, *self._counted)
        # One process that stands for all ranks sends nothing, which is no measurement of what they would send.
        sent = dict.fromkeys(sent) if self._is_emulated else sent | self._links.record(self._steps - self._warmup_steps)
        return sent | {
            "counted_steps": self._counted[0],
            "sync_payload_bytes": float(np.median(payloads)) if payloads else 0,
            "sync_ms_p50": float(np.median(durations)) * 1e3 if durations else None,
            "compression": self._compression_record(),
        }

    def _compression_record(self) -> dict[str, dict[str, dict[str, float]]]:
        """Numbers of what compresses, mean and maximum over the ranks."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, {name: of.record() for name, of in self._engine.compressors.items()})
        return {
            name: {key: mean_and_max([of[name][key] for of in ranks]) for key in values}
            for name, values in ranks[0].items()
        }


def _percentiles_and_mean(durations_s: list[float]) -> dict[str, float | None]:
    """With the mean, since no percentile tells of what most steps lack, as averaging every K steps."""
    return percentiles_ms(durations_s) | {"mean": float(np.mean(durations_s)) * 1e3 if durations_s else None}
