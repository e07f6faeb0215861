"""Finished runs as one data frame."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sparse2d.errors import UserError
from sparse2d.metrics import normalized_entropy


def load_runs(results_dir: Path, experiment: str) -> pd.DataFrame:
    """One row for each completed run of an experiment, its record's nested keys joined by dots; empty if there is none.

    ``progressive.ne`` is the NE of the training rows, each scored before the model trained on it, over the whole pass;
    ``folder`` is the run's.

    Raises:
        UserError: if a record cannot be read.
    """
    records = []
    for path in sorted((results_dir / "runs" / experiment).glob("*/record.json")):
        try:
            record = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is no JSON ({error}); delete the folder and run it again") from error
        if record["status"] == "completed":
            record |= {"folder": str(path.parent), "progressive": {"ne": _progressive_ne(path.parent, record)}}
            records.append(record)
    # As objects: a null among integers would make them all floats, and a run look different for its neighbours.
    return pd.DataFrame([dict(flat(record)) for record in records], dtype=object)


def progressive_losses(folder: Path) -> pd.DataFrame:
    """Logged windows of a run's pass: ``rows`` trained on by their end, ``new_rows`` in them, their mean ``loss``."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    points = [point for point in map(json.loads, lines) if "loss" in point]
    windows = pd.DataFrame(points, columns=["rows", "loss"]).astype({"loss": float})
    return windows.assign(new_rows=windows["rows"].diff().fillna(windows["rows"]))


def _progressive_ne(folder: Path, record: dict[str, Any]) -> float | None:
    windows = progressive_losses(folder)
    if windows.empty:
        return None
    loss = (windows["loss"] * windows["new_rows"]).sum() / windows["new_rows"].sum()
    return normalized_entropy(float(loss), record["data"]["base_rate"])


def flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Items of a nested record, their keys joined by dots."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
