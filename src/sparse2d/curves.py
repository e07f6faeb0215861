"""A run's curves as one picture, from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from sparse2d.data.atomic import replacing

# Beside NE: what is drawn of training points, and in which unit.
OTHERS = [
    ("qps", "QPS since the warm-up", 1.0),
    ("rank0/sent_bytes_per_step", "MB sent by rank 0 in a step", 1e-6),
    ("rank0/peak_rss_bytes", "peak memory of rank 0, GB", 1e-9),
]


def draw_curves(metrics: Path, picture: Path) -> None:
    """NE against rows (while training, and on held-out rows), QPS, and bytes sent by rank 0, as PNG.

    Args:
        metrics: a run's metrics.jsonl.
        picture: the file to write.
    """
    # Neither pyplot, which keeps state, nor an import at the top: only rank 0 of a tracked run draws.
    from matplotlib.figure import Figure

    points = [json.loads(line) for line in metrics.read_text().splitlines()]
    training = [point for point in points if "loss" in point]
    last_rows = training[-1]["rows"] if training else 0
    evaluated = [{"rows": last_rows, **point} for point in points if "eval/ne" in point]
    # Emulated ranks send nothing.
    others = [(key, name, scale) for key, name, scale in OTHERS if any(point.get(key) for point in training)]
    figure = Figure(figsize=(3.4 * (1 + len(others)), 3), layout="constrained")
    curves, *rest = figure.subplots(1, 1 + len(others), squeeze=False)[0]
    _plot(curves, training, "ne", label="training rows, before training on them", color="#0072B2")
    _plot(curves, evaluated, "eval/ne", label="held-out rows", marker="o", color="#D55E00")
    curves.axhline(1, color="0.6", linestyle=":", label="constant predictor")
    curves.set_ylabel("NE")
    curves.legend(fontsize=7, frameon=False)
    for axes, (key, name, scale) in zip(rest, others, strict=True):
        _plot(axes, training, key, scale, color="#000000")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
    for axes in (curves, *rest):
        axes.set_xlabel("training rows")
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})


def _plot(axes: Any, points: list[dict[str, Any]], key: str, scale: float = 1.0, **style: str) -> None:
    defined = [(point["rows"], point[key] * scale) for point in points if point.get(key) is not None]
    if defined:
        axes.plot(*zip(*defined, strict=True), **style)
