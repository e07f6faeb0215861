"""A run's curves as one picture, from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from sparse2d.data.atomic import replacing


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
    figure = Figure(figsize=(10, 3), layout="constrained")
    curves, speed, sent = figure.subplots(1, 3)
    _plot(curves, training, "ne", "training rows, before training on them", marker="", color="#0072B2")
    _plot(curves, evaluated, "eval/ne", "held-out rows", marker="o", color="#D55E00")
    curves.axhline(1, color="0.6", linestyle=":", label="constant predictor")
    curves.set_ylabel("NE")
    curves.legend(fontsize=7, frameon=False)
    _plot(speed, training, "qps", "", marker="", color="#000000")
    speed.set_ylabel("QPS since the warm-up")
    _plot(sent, training, "rank0/sent_bytes_per_step", "", marker="", color="#000000", scale=1e-6)
    sent.set_ylabel("MB sent by rank 0 in a step")
    for axes in (curves, speed, sent):
        axes.set_xlabel("training rows")
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})


def _plot(axes: Any, points: list[dict[str, Any]], key: str, label: str, scale: float = 1.0, **style: str) -> None:
    defined = [(point["rows"], point[key] * scale) for point in points if point.get(key) is not None]
    if defined:
        axes.plot(*zip(*defined, strict=True), label=label, **style)
