"""What the engine, checkpoints and records know of anything that compresses."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sparse2d.units import size


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


def savings(comms: Mapping[str, Any]) -> str | None:
    """One line on what compression left to send; None without any.

    Args:
        comms: that part of a run's record: bytes are means over ranks and counted steps, warm-up included.
    """
    of = comms["compression"]
    told = []
    if "dense" in of:
        sent, plain = comms["dense_bytes_per_step"]["mean"], of["dense"]["plain_bytes"]["mean"]
        times = f", {plain / sent:.3g} times as much" if sent else ""
        told.append(f"{size(sent)} of dense gradients (uncompressed {size(plain)}{times})")
    if "lookup" in of:
        parts = comms["lookup_parts_bytes_per_step"]
        sent = sum(part["mean"] for name, part in parts.items() if name != "ids")
        share = of["lookup"].get("sent_share")
        told.append(
            f"{size(sent)} of pooled embeddings and their gradients"
            + ("" if share is None else f" ({share['mean']:.2%} of the entries)")
        )
    return f"compression: a rank sent, in a step, {' and '.join(told)}" if told else None


def compress_times(seconds: Sequence[float]) -> dict[str, float]:
    """For a record: what compressing took of a step, mean and median in ms; 0 before the first one.

    Args:
        seconds: of each step, waiting for others left out.
    """
    return {
        "compress_ms_mean": statistics.fmean(seconds or [0.0]) * 1e3,
        "compress_ms_p50": statistics.median(seconds or [0.0]) * 1e3,
    }
