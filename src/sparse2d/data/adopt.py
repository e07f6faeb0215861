"""Arrays that MLPerf's or TorchRec's scripts made: read once to describe them, then used where they are.

What is written is a manifest alone, in ``data.out_dir``. Ids within the tables are taken as they are. If any is beyond
them (TorchRec's ``tsv_to_npys`` keeps whole tokens), ``data.ids=hash`` takes all modulo the tables' rows, as TorchRec's
own loader does with ``hashes``; else it is refused.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparse2d
from sparse2d.config import NUM_DENSE, NUM_SPARSE, DataConfig, IdMapping
from sparse2d.data.arrays import open_multi_hot
from sparse2d.data.atomic import replacing
from sparse2d.data.digests import KnownDigests
from sparse2d.data.manifest import (
    SCHEMA,
    Columns,
    Day,
    Manifest,
    OutputFile,
    array_name,
    content_digest,
    key_digest,
    multi_hot_name,
    read_manifest,
)
from sparse2d.data.seen import SeenIds
from sparse2d.data.splits import labelled_splits, split_options, split_ranges
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

_PIECE_ROWS = 1 << 16


def adopt(arrays: Path, data: DataConfig, out_dir: Path) -> Path:
    """Return a folder that describes the arrays of another folder.

    Raises:
        UserError: if a day is incomplete, an array has another type or shape, a value is not finite, or an id is
            beyond its table and may not be taken modulo its rows.
    """
    days = _days(arrays, data)
    known = KnownDigests(out_dir / ".digests.json")
    mapped = {day: _map(arrays, day) for day in days}
    files = {
        name: OutputFile((arrays / name).stat().st_size, known.get_or_read(arrays / name), array.dtype.name, shape)
        for day in days
        for name, array in mapped[day].items()
        for shape in [list(array.shape)]
    } | {
        name: OutputFile((arrays / name).stat().st_size, known.get_or_read(arrays / name), "int32", [])
        for name in map(multi_hot_name, days)
        if (arrays / name).is_file()
    }
    options = {
        "schema": SCHEMA,
        "days": days,
        "num_embeddings": data.num_embeddings,
        "ids": data.ids.name,
        "split": split_options(data),
    }
    shas = {name: file.sha256 for name, file in files.items()}
    key = key_digest({**options, "arrays": str(arrays.resolve()), "files": shas})
    folder = out_dir / f"{data.name}-{key[:12]}"
    if not folder.is_dir():
        manifest = _describe(arrays, days, data, files, options)
        with replacing(folder) as temporary:
            temporary.mkdir()
            manifest.write(temporary)
        log.info("described %s in %s: %d rows, digest %s", arrays, folder, manifest.rows, manifest.digest[:12])
    if read_manifest(folder).modulo:
        log.warning(
            "%s has ids beyond the tables: all are taken modulo the tables' rows (data.ids=hash; as_found refuses)",
            arrays,
        )
    return folder


def _days(arrays: Path, data: DataConfig) -> list[int]:
    found = {int(match[1]) for path in arrays.iterdir() if (match := re.fullmatch(r"day_(\d+)_dense\.npy", path.name))}
    days = sorted(found if data.days is None else data.days)
    for day in days:
        if not (arrays / array_name(day, "sparse")).is_file() and not (arrays / multi_hot_name(day)).is_file():
            raise UserError(f"{arrays}: no {array_name(day, 'sparse')} beside {array_name(day, 'dense')}; add it")
        for part in ("dense", "labels"):
            if not (arrays / array_name(day, part)).is_file():
                raise UserError(f"{arrays}: no {array_name(day, part)}; add it, or leave day {day} out with data.days")
    return days


def _map(arrays: Path, day: int) -> dict[str, NDArray[Any]]:
    """The day's arrays by file name, checked for type and shape."""
    expected = {"dense": ("f", NUM_DENSE), "sparse": ("iu", NUM_SPARSE), "labels": ("iu", 1)}
    mapped = {}
    for part, (kinds, columns) in expected.items():
        path = arrays / array_name(day, part)
        if not path.is_file():
            continue
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(f"{path}: not a .npy file ({error}); make it again") from error
        if array.ndim != 2 or array.shape[1] != columns or array.dtype.kind not in kinds:
            raise UserError(f"{path}: {array.dtype.name}{list(array.shape)}, expected [rows, {columns}]; make it again")
        mapped[path.name] = array
    rows = {name: len(array) for name, array in mapped.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        raise UserError(f"{arrays}: {rows}, expected the same number of rows, at least 1; make them again")
    return mapped


def _describe(
    arrays: Path, days: list[int], data: DataConfig, files: dict[str, OutputFile], options: dict[str, Any]
) -> Manifest:
    places, first_row = [], 0
    for day in days:
        rows = files[array_name(day, "dense")].shape[0]
        places.append(Day(day, first_row, rows))
        first_row += rows
    splits = labelled_splits(split_ranges([place.rows for place in places], data, arrays), places, arrays, arrays)
    columns = _columns(arrays, days, data.num_embeddings)
    modulo = _takes_modulo(arrays, columns, data)
    return Manifest(
        schema=SCHEMA,
        name=data.name,
        digest=content_digest(files, splits),
        rows=first_row,
        num_embeddings=data.num_embeddings,
        splits=splits,
        mappings={"dense": "as found", "sparse": "modulo table rows" if modulo else "as found"},
        columns=columns,
        days=places,
        files=files,
        source={"arrays": arrays.name},
        versions={"sparse2d": sparse2d.__version__, "numpy": np.__version__},
        options=options,
        arrays_at=str(arrays.resolve()),
        modulo=modulo,
    )


def _takes_modulo(arrays: Path, columns: Columns, data: DataConfig) -> bool:
    """Whether ids go beyond the tables, and are to be taken modulo their rows."""
    found = zip(columns.sparse_min, columns.sparse_max, data.num_embeddings, strict=True)
    for number, (lowest, highest, rows) in enumerate(found, start=1):
        if lowest < 0 or highest >= rows:
            if data.ids is IdMapping.hash:
                return True
            raise UserError(
                f"{arrays}: C{number} has ids from {lowest} to {highest}, expected 0 to {rows - 1}: raise "
                "data.table_rows (and data.max_table_rows), or set data.ids=hash to take all modulo the tables' rows"
            )
    return False


def _columns(arrays: Path, days: list[int], num_embeddings: list[int]) -> Columns:
    """Statistics of all rows."""
    dense_min, dense_max = np.full(NUM_DENSE, np.inf), np.full(NUM_DENSE, -np.inf)
    sparse_min, sparse_max = np.full(NUM_SPARSE, np.iinfo(np.int64).max), np.full(NUM_SPARSE, np.iinfo(np.int64).min)
    labels_seen: set[int] = set()
    seen = SeenIds(num_embeddings)
    for name, first_row, (dense, sparse, labels) in _pieces(arrays, days):
        if not np.isfinite(dense).all():
            row = first_row + int(np.nonzero(~np.isfinite(dense).all(axis=1))[0][0])
            raise UserError(f"{arrays / name}: row {row} has a value that is not finite; make it again")
        np.minimum(dense_min, dense.min(axis=0), out=dense_min)
        np.maximum(dense_max, dense.max(axis=0), out=dense_max)
        np.minimum(sparse_min, sparse.min(axis=0), out=sparse_min)
        np.maximum(sparse_max, sparse.max(axis=0), out=sparse_max)
        labels_seen |= set(np.unique(labels).tolist())
        seen.add((sparse % np.array(num_embeddings)).astype(np.int32))
    return Columns(
        dense_min=dense_min.tolist(),
        dense_max=dense_max.tolist(),
        dense_missing=None,
        sparse_min=sparse_min.tolist(),
        sparse_max=sparse_max.tolist(),
        sparse_missing=None,
        sparse_distinct=seen.distinct(),
        sparse_oov=None,
        labels=[min(labels_seen), max(labels_seen)],
    )


def _pieces(arrays: Path, days: list[int]) -> Iterator[tuple[str, int, tuple[NDArray[Any], ...]]]:
    """The name of the dense file, the first row and the rows of each piece."""
    for day in days:
        dense, labels = (np.load(arrays / array_name(day, part), mmap_mode="r") for part in ("dense", "labels"))
        path = arrays / array_name(day, "sparse")
        multi_hot = arrays / multi_hot_name(day)
        columns = [np.load(path, mmap_mode="r")] if path.is_file() else open_multi_hot(multi_hot, len(dense))
        width = None if path.is_file() else 1
        for start in range(0, len(dense), _PIECE_ROWS):
            rows = slice(start, start + _PIECE_ROWS)
            sparse = np.concatenate([column[rows, :width] for column in columns], axis=1)
            yield array_name(day, "dense"), start, (dense[rows], sparse, labels[rows])
