"""Which rows train, which validate, which test: row ranges over all days in numeric order."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from sparse2d.config import DataConfig, SplitKind
from sparse2d.data.manifest import Day, Split, array_name
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

_NAMES = ("train", "eval", "test")


def check_split_options(data: DataConfig) -> None:
    """Refuse options that contradict each other, before any row is read."""
    if min(data.train_parts, data.eval_parts) < 1:
        raise UserError(
            f"data.train_parts={data.train_parts} and data.eval_parts={data.eval_parts}, expected each at least 1"
        )
    if (data.split is SplitKind.rows) != (data.split_rows is not None):
        raise UserError("data.split=rows and data.split_rows need each other: give both or neither")
    if data.split_rows is not None:
        names = set(data.split_rows)
        if not {"train", "eval"} <= names <= set(_NAMES):
            raise UserError(f"data.split_rows has {sorted(names)}, expected train, eval and, if wanted, test")
        if data.halve_eval:
            raise UserError("data.halve_eval=true has no effect with data.split=rows; give the ranges as wanted")


def split_options(data: DataConfig) -> list[object]:
    """What decides the splits of given rows, for a dataset's key."""
    return [data.split.name, data.train_parts, data.eval_parts, data.halve_eval, data.split_rows]


def check_num_days(num_days: int, data: DataConfig, what: object) -> None:
    """Refuse to set the last day apart where there is no other."""
    if data.split is SplitKind.last_day and num_days < 2:
        raise UserError(f"{what}: data.split=last_day needs at least 2 days, found {num_days}")


def split_ranges(day_rows: Sequence[int], data: DataConfig, what: object) -> dict[str, range]:
    """Row ranges of train, eval and maybe test; ``what`` names the input in errors.

    An odd row of two halves goes to the first, as in TorchRec and MLPerf.

    Raises:
        UserError: if there are too few rows or days, or the given ranges overlap or leave the dataset.
    """
    rows = sum(day_rows)
    if data.split_rows is not None:
        return _given(data.split_rows, rows)
    check_num_days(len(day_rows), data, what)
    if data.split is SplitKind.last_day:
        num_train, how = rows - day_rows[-1], "with the last day apart"
    else:
        num_train = rows * data.train_parts // (data.train_parts + data.eval_parts)
        how = f"in parts {data.train_parts}:{data.eval_parts}"
    num_eval = rows - num_train
    if num_train < 1 or num_eval < 1 + data.halve_eval:
        raise UserError(
            f"{what}: {rows} rows {how} leave {num_train} to train and {num_eval} to evaluate, expected at least 1 "
            f"and {1 + data.halve_eval}; give more rows or other data.train_parts and data.eval_parts"
        )
    if not data.halve_eval:
        return {"train": range(num_train), "eval": range(num_train, rows)}
    middle = num_train + (num_eval + 1) // 2
    return {"train": range(num_train), "eval": range(num_train, middle), "test": range(middle, rows)}


def _given(wanted: Mapping[str, Sequence[int]], rows: int) -> dict[str, range]:
    ranges = {}
    for name in (name for name in _NAMES if name in wanted):
        bounds = list(wanted[name])
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= rows:
            raise UserError(f"data.split_rows.{name}={bounds}, expected [start, stop) within the {rows} rows")
        ranges[name] = range(*bounds)
    ordered = sorted(ranges.items(), key=lambda item: item[1].start)
    for (left, a), (right, b) in pairwise(ordered):
        if a.stop > b.start:
            raise UserError(f"data.split_rows: {left}=[{a.start}, {a.stop}) and {right}=[{b.start}, {b.stop}) overlap")
    return ranges


def count_labels(ranges: Mapping[str, range], days: Sequence[Day], arrays: Path) -> dict[str, Split]:
    """The splits with their positives, counted in the ``labels`` arrays of a folder, of which nothing is kept."""
    positives = dict.fromkeys(ranges, 0)
    for day in days:
        labels = np.load(arrays / array_name(day.day, "labels"), mmap_mode="r")
        for name, rows in ranges.items():
            part = slice(max(rows.start - day.first_row, 0), max(rows.stop - day.first_row, 0))
            positives[name] += int(labels[part].sum(dtype=np.int64))
    return {
        name: Split(rows.start, rows.stop, positives[name], positives[name] / len(rows))
        for name, rows in ranges.items()
    }


def labelled_splits(ranges: Mapping[str, range], days: Sequence[Day], arrays: Path, what: object) -> dict[str, Split]:
    """``count_labels`` of rows to train on; ``what`` names the input in errors.

    Raises:
        UserError: if the training rows have one label only: there is no entropy to normalise by.
    """
    splits = count_labels(ranges, days, arrays)
    train = splits["train"]
    if train.base_rate in (0.0, 1.0):
        raise UserError(
            f"{what}: all {train.stop - train.start} training rows have label {int(train.base_rate)}, "
            "so that normalized entropy is undefined; give rows of both labels"
        )
    for name, split in splits.items():
        if split.base_rate in (0.0, 1.0):
            rows, label = split.stop - split.start, int(split.base_rate)
            log.warning("%s: all %d %s rows have label %d: their NE and AUC are undefined", what, rows, name, label)
    return splits
