"""Finished runs as one data frame."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sparse2d.errors import UserError


def load_runs(results_dir: Path, experiment: str) -> pd.DataFrame:
    """One row for each completed run of an experiment, its record's nested keys joined by dots; empty if there is none.

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
            records.append(record)
    # As objects: a null among integers would make them all floats, and a run look different for its neighbours.
    return pd.DataFrame([dict(_flat(record)) for record in records], dtype=object)


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
