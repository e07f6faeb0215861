"""A prepared dataset opened for training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE
from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.manifest import PARTS, Day, Manifest, Split, array_name, multi_hot_name, read_manifest
from sparse2d.data.npy import map_npz
from sparse2d.errors import UserError


@dataclass(frozen=True)
class DayArrays:
    """One day's memory maps, rows ``[first_row, first_row + rows)`` of the dataset.

    ``dense`` float32 [rows, 13], ``sparse`` int [rows, 26], ``labels`` int32 [rows, 1]. ``multi_hot`` are MLPerf's 26
    arrays int32 [rows, ids], where they are there; ``sparse`` is null where there is nothing but them.
    """

    first_row: int
    rows: int
    dense: NDArray[np.float32]
    labels: NDArray[np.int32]
    sparse: NDArray[np.integer[Any]] | None
    multi_hot: list[NDArray[np.int32]] | None = None


@dataclass(frozen=True)
class Dataset:
    """Memory-mapped days, of which nothing is in memory before a batch needs it.

    ``train`` and ``eval`` are the row ranges in use, over all days in order; ``base_rate`` is the share of positives
    among the former. ``hotness`` is how many ids each feature has in a row.
    """

    path: Path
    manifest: Manifest
    days: list[DayArrays]
    train: range
    eval: range
    base_rate: float
    hotness: tuple[int, ...] = (1,) * NUM_SPARSE

    @property
    def name(self) -> str:
        """The name it was prepared under."""
        return self.manifest.name

    @property
    def digest(self) -> str:
        """The sha256 that stands for its arrays and splits."""
        return self.manifest.digest

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        return tuple(self.manifest.num_embeddings)


def open_dataset(
    path: Path | str,
    train_rows: int | None = None,
    eval_rows: int | None = None,
    multi_hot: Sequence[int] | None = None,
) -> Dataset:
    """Open a prepared folder and check what can be known before training; null uses all rows of a split.

    ``multi_hot`` are the ids that each feature gets in a row, null for one each.

    Raises:
        UserError: if a file is missing or not as the manifest says, an id or label is out of range, or there are fewer
            rows than asked for.
    """
    hotness = _hotness(multi_hot)
    folder = Path(path)
    manifest = read_manifest(folder)
    manifest.check_files(folder)
    days = [_open_day(manifest.arrays_in(folder), day, manifest) for day in manifest.days]
    _check_hotness(folder, days, hotness)
    _check_ranges(folder, manifest)
    train = _rows_in_use("train", manifest.splits["train"], train_rows)
    base_rate = _base_rate(days, manifest.splits["train"], train)
    if not 0.0 < base_rate < 1.0:
        raise UserError(
            f"{folder}: the first {len(train)} training rows all have label {int(base_rate)}, so that normalized "
            "entropy is undefined; raise data.train_rows"
        )
    return Dataset(
        path=folder,
        manifest=manifest,
        days=days,
        train=train,
        eval=_rows_in_use("eval", manifest.splits["eval"], eval_rows),
        base_rate=base_rate,
        hotness=hotness,
    )


def _hotness(multi_hot: Sequence[int] | None) -> tuple[int, ...]:
    hotness = (1,) * NUM_SPARSE if multi_hot is None else tuple(multi_hot)
    if len(hotness) != NUM_SPARSE or min(hotness) < 1:
        raise UserError(f"data.multi_hot={list(hotness)}, expected {NUM_SPARSE} integers, each at least 1")
    return hotness


def _check_hotness(folder: Path, days: list[DayArrays], hotness: tuple[int, ...]) -> None:
    for day in days:
        if day.multi_hot is not None and max(hotness) > 1:
            found = tuple(array.shape[1] for array in day.multi_hot)
            if found != hotness:
                raise UserError(
                    f"{folder}: its multi-hot arrays have {list(found)} ids, data.multi_hot={list(hotness)}; "
                    "give the same, or null for one id each"
                )


def _base_rate(days: list[DayArrays], split: Split, rows: range) -> float:
    if len(rows) == split.stop - split.start:
        # Counted when it was prepared: no need to read the labels of all days at each start.
        return split.base_rate
    positives = sum(
        int(day.labels[max(rows.start - day.first_row, 0) : max(rows.stop - day.first_row, 0)].sum(dtype=np.int64))
        for day in days
    )
    return positives / len(rows)


def _open_day(folder: Path, day: Day, manifest: Manifest) -> DayArrays:
    arrays = {
        part: _open_array(folder, name, manifest)
        for part in PARTS
        if (name := array_name(day.day, part)) in manifest.files
    }
    multi_hot = folder / multi_hot_name(day.day)
    return DayArrays(
        day.first_row,
        day.rows,
        arrays["dense"],
        arrays["labels"],
        arrays.get("sparse"),
        open_multi_hot(multi_hot, day.rows) if multi_hot.name in manifest.files else None,
    )


def open_multi_hot(path: Path, rows: int) -> list[NDArray[np.int32]]:
    """Map MLPerf's 26 arrays of one day's multi-hot ids, int [rows, ids] each.

    Raises:
        UserError: if the file holds anything else.
    """
    arrays = map_npz(path)
    if len(arrays) != NUM_SPARSE:
        raise UserError(f"{path}: {len(arrays)} arrays, expected {NUM_SPARSE}; make it again")
    for name, array in enumerate(arrays):
        if array.ndim != 2 or array.dtype.kind not in "iu" or len(array) != rows or array.shape[1] < 1:
            found = f"{array.dtype.name}{list(array.shape)}"
            raise UserError(f'{path}: array "{name}" is {found}, expected integers [{rows}, ids]; make it again')
    return arrays


def _open_array(folder: Path, name: str, manifest: Manifest) -> NDArray[Any]:
    expected = manifest.files[name]
    try:
        array: NDArray[Any] = np.load(folder / name, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{folder / name}: not a .npy file ({error}); delete {folder} and prepare it again") from error
    if (array.dtype.name, list(array.shape)) != (expected.dtype, expected.shape):
        raise UserError(
            f"{folder / name}: {array.dtype.name}{list(array.shape)}, expected {expected.dtype}{expected.shape}; "
            f"delete {folder} and prepare it again"
        )
    return array


def _check_ranges(folder: Path, manifest: Manifest) -> None:
    columns = manifest.columns
    ids = zip(FEATURE_NAMES, columns.sparse_min, columns.sparse_max, manifest.num_embeddings, strict=True)
    for feature, low, high, limit in ids:
        if not manifest.modulo and (low < 0 or high >= limit):
            raise UserError(
                f"{folder}: {feature} has id {low if low < 0 else high}, expected 0 to {limit - 1}; prepare it again "
                "with the table rows in use"
            )
    if not set(columns.labels) <= {0, 1}:
        raise UserError(f"{folder}: labels run from {columns.labels[0]} to {columns.labels[1]}, expected 0 and 1")


def _rows_in_use(name: str, split: Split, wanted: int | None) -> range:
    available = split.stop - split.start
    if wanted is None:
        return range(split.start, split.stop)
    if not 1 <= wanted <= available:
        raise UserError(f"data.{name}_rows={wanted}, expected 1 to {available}, the rows of that split; null = all")
    return range(split.start, split.start + wanted)
