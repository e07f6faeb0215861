"""Milliseconds of a core's time a step that DCT-DP takes, by L and against the exact top-k of every step.

Measured is what a rank does itself with a gradient: accumulate it, find the threshold if that is due, pick the entries,
round them and take them out. Gradients are random, of the sizes of two models; a step that finds a threshold and one
that reuses it are timed apart, and their mean over L steps is what L costs.

    python experiments/dct_dp/bench.py      writes results/tables/dct_compression_time.csv
"""

import itertools
import statistics
import time
from pathlib import Path

import pandas as pd
import torch

from sparse2d.compression.error_feedback import ErrorFeedback
from sparse2d.config import Scope, ThresholdConfig, ValueDtype
from sparse2d.records import write_atomically

TABLE = Path(__file__).parents[2] / "results" / "tables" / "dct_compression_time.csv"
# Layers of the two multilayer perceptrons: the default model here, and MLPerf's DLRM.
MODELS = {
    "dlrm (default)": [[13, 64, 16], [367, 64, 32, 1]],
    "dlrm (MLPerf)": [[13, 512, 256, 128], [479, 1024, 1024, 512, 256, 1]],
}
DENSITIES = (0.005,)
LIFETIMES = (1, 16, 128, 1000, 4096)
REPEATS = 25
REUSED = 10**6


def sizes(layers: list[list[int]]) -> dict[str, int]:
    """Elements of each weight and bias."""
    pairs = [pair for perceptron in layers for pair in itertools.pairwise(perceptron)]
    weights = {f"weight_{i}": inputs * outputs for i, (inputs, outputs) in enumerate(pairs)}
    return weights | {f"bias_{i}": outputs for i, (_, outputs) in enumerate(pairs)}


def step_ms(parts: dict[str, int], density: float) -> tuple[float, float]:
    """The middle one of the steps that find a threshold and of those that reuse one."""
    config = ThresholdConfig(density=density, lifetime=1, value_dtype=ValueDtype.bf16)
    feedback = ErrorFeedback(parts, config, Scope.model, torch.device("cpu"))
    gradients = [torch.randn(sum(parts.values())).split(list(parts.values())) for _ in range(4)]
    times: dict[int, list[float]] = {1: [], REUSED: []}
    # What is held back takes 1 / density steps to be as much as it will stay.
    fill = round(1 / density)
    for step in range(1, fill + REPEATS + 1):
        config.lifetime = 1 if step <= fill else REUSED
        start = time.thread_time()
        for name, gradient in zip(parts, gradients[step % 4], strict=True):
            feedback.add(name, gradient)
        entries = feedback.entries(feedback.select(step))
        feedback.take(entries)
        times[config.lifetime].append((time.thread_time() - start) * 1e3)
    return statistics.median(times[1][-REPEATS:]), statistics.median(times[REUSED])


def main() -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for (model, layers), density in itertools.product(MODELS.items(), DENSITIES):
        parts = sizes(layers)
        finds, reuses = step_ms(parts, density)
        for lifetime in LIFETIMES:
            ms = (finds + (lifetime - 1) * reuses) / lifetime
            rows.append(
                {
                    "label": "measured",
                    "model": model,
                    "elements": sum(parts.values()),
                    "density": density,
                    "lifetime": lifetime,
                    "compress_ms": ms,
                    "ratio_to_topk": finds / ms,
                }
            )
    table = pd.DataFrame(rows)
    write_atomically(TABLE, table.to_csv(index=False, float_format="%.6g"))
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
