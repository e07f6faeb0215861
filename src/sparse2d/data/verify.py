"""Verify a prepared dataset against its manifest: sizes, digests, shapes, ranges, finite values, statistics."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.data.arrays import open_dataset
from sparse2d.data.criteo import DENSE_NAMES, FEATURE_NAMES
from sparse2d.data.digests import sha256_of
from sparse2d.data.manifest import Manifest, array_name, content_digest, read_manifest
from sparse2d.errors import UserError

_PIECE_ROWS = 1 << 16


def verify(folder: Path) -> list[str]:
    """Everything that is wrong, one line each; empty for a sound dataset.

    Raises:
        UserError: if there is no manifest that can be read.
    """
    manifest = read_manifest(folder)
    arrays_at = manifest.arrays_in(folder)
    faults = []
    for name, expected in manifest.files.items():
        path = arrays_at / name
        if not path.is_file():
            faults.append(f"{path}: missing, expected {expected.bytes} bytes")
        elif path.stat().st_size != expected.bytes:
            faults.append(f"{path}: {path.stat().st_size} bytes, expected {expected.bytes}")
        elif (found := sha256_of(path)) != expected.sha256:
            faults.append(f"{path}: sha256 {found[:12]}..., expected {expected.sha256[:12]}...")
    if content_digest(manifest.files, manifest.splits) != manifest.digest:
        faults.append(f"{folder}: the manifest's digest is not that of its files and splits")
    if not any("bytes" in fault for fault in faults):
        faults += _content_faults(folder, manifest)
    return faults


def refuse_unsound(folder: Path, most_bytes: int) -> None:
    """Verify a dataset that is small enough for it to take no time worth mentioning; larger ones are left alone.

    Raises:
        UserError: with a bad value if there is one, else the first fault.
    """
    if sum(file.bytes for file in read_manifest(folder).files.values()) > most_bytes:
        return
    if faults := verify(folder):
        # A changed digest says less than the value that changed.
        told = next((fault for fault in faults if ": row " in fault), faults[0])
        raise UserError(f"{told}; delete {folder} and prepare it again")


def _content_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Faults of the values, where the files have their sizes."""
    try:
        dataset = open_dataset(folder)
    except UserError as error:
        yield str(error)
        return
    for day, arrays in zip(manifest.days, dataset.days, strict=True):
        sparse = arrays.sparse
        where = manifest.arrays_in(folder)
        for start in range(0, arrays.rows, _PIECE_ROWS):
            rows = slice(start, start + _PIECE_ROWS)
            yield from _first(
                where / array_name(day.day, "dense"), start, ~np.isfinite(arrays.dense[rows]), DENSE_NAMES, "not finite"
            )
            if sparse is not None and not manifest.modulo:
                ids = sparse[rows]
                bad = (ids < 0) | (ids >= np.array(manifest.num_embeddings))
                yield from _bad_ids(where / array_name(day.day, "sparse"), start, ids, bad, manifest.num_embeddings)
            bad = (arrays.labels[rows] < 0) | (arrays.labels[rows] > 1)
            yield from _first(where / array_name(day.day, "labels"), start, bad, ("label",), "not 0 or 1")


def _bad_ids(
    path: Path, start: int, ids: NDArray[Any], bad: NDArray[np.bool_], num_embeddings: Sequence[int]
) -> Iterator[str]:
    """The first id of a piece that its table does not have."""
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        yield (
            f"{path}: row {start + row}: {FEATURE_NAMES[column]} has id {ids[row, column]}, "
            f"expected 0 to {num_embeddings[column] - 1}"
        )


def _first(path: Path, start: int, bad: NDArray[Any], names: tuple[str, ...], what: str) -> Iterator[str]:
    """The first bad value of a piece, if there is one, and how many more."""
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        yield f"{path}: row {start + row}: {names[column]} is {what} ({int(bad.sum())} such values in this piece)"
