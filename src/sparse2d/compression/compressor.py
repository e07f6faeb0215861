"""What the engine, checkpoints and records know of anything that compresses."""

import statistics
from collections.abc import Sequence
from typing import Any, Protocol


class Compressor(Protocol):
    """Compresses one kind of traffic of this rank."""

    def begin_step(self, step: int) -> None:
        """Call before each training step, 1-based: thresholds are found and warm-ups end by it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of this rank: plain tensors, dicts with text keys, lists and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout and config."""

    def record(self) -> dict[str, Any]:
        """What was measured on this rank, by name; the run's record has the mean and maximum over the ranks."""


def compress_times(seconds: Sequence[float]) -> dict[str, float]:
    """For a record: what compressing took of a step, mean and median in ms; 0 before the first one.

    Args:
        seconds: of each step, waiting for others left out.
    """
    return {
        "compress_ms_mean": statistics.fmean(seconds or [0.0]) * 1e3,
        "compress_ms_p50": statistics.median(seconds or [0.0]) * 1e3,
    }
