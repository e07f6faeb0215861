"""Verify a prepared dataset against its manifest: sizes, digests, shapes, ranges, finite values, vocabulary, splits."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE
from sparse2d.data.arrays import open_dataset
from sparse2d.data.criteo import DENSE_NAMES, FEATURE_NAMES
from sparse2d.data.digests import sha256_of
from sparse2d.data.manifest import Manifest, array_name, content_digest, multi_hot_name, read_manifest
from sparse2d.data.splits import count_labels
from sparse2d.errors import UserError

_PIECE_ROWS = 1 << 16


def verify(folder: Path) -> list[str]:
    """Everything that is wrong, one line each; empty for a sound dataset.

    Raises:
        UserError: if there is no manifest that can be read.
    """
    manifest = read_manifest(folder)
    faults, whole = [], True
    for name, expected in manifest.files.items():
        path = manifest.arrays_in(folder) / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected.bytes:
            faults.append(f"{path}: {'missing' if size is None else f'{size} bytes'}, expected {expected.bytes} bytes")
            whole = False
        elif (found := sha256_of(path)) != expected.sha256:
            faults.append(f"{path}: sha256 {found[:12]}..., expected {expected.sha256[:12]}...")
    if content_digest(manifest.files, manifest.splits) != manifest.digest:
        faults.append(f"{folder}: the manifest's digest is not that of its files and splits")
    if whole:
        faults += _content_faults(folder, manifest)
    if manifest.mappings.get("vocabulary"):
        faults += _vocabulary_faults(folder, manifest)
    return faults


def _vocabulary_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    # Numba takes half a second to import: not for a dataset without a vocabulary.
    from sparse2d.data.vocabulary import FIRST, VOCABULARY, Vocabulary

    path = folder / VOCABULARY
    if not path.is_file():
        yield f"{path}: missing; without it no other day can be given these ids"
        return
    try:
        vocabulary = Vocabulary.load(path)
    except UserError as error:
        yield str(error)
        return
    if vocabulary.digest != manifest.mappings["vocabulary"]:
        yield f"{path}: digest {vocabulary.digest[:12]}..., expected {manifest.mappings['vocabulary'][:12]}..."
    for feature, tokens, rows in zip(FEATURE_NAMES, vocabulary.tokens, manifest.num_embeddings, strict=True):
        if len(tokens) + FIRST > rows:
            yield f"{path}: {feature} has {len(tokens)} tokens, expected {rows - FIRST} at most, for {rows} table rows"


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
                name = array_name(day.day, "sparse")
                yield from _bad_ids(where / name, start, sparse[rows], range(NUM_SPARSE), manifest)
            for feature, bag in enumerate(arrays.multi_hot or ()):
                if not manifest.modulo:
                    ids = bag[rows]
                    yield from _bad_ids(where / multi_hot_name(day.day), start, ids, [feature] * ids.shape[1], manifest)
            bad = (arrays.labels[rows] < 0) | (arrays.labels[rows] > 1)
            yield from _first(where / array_name(day.day, "labels"), start, bad, ("label",), "not 0 or 1")
    ranges = {name: range(split.start, split.stop) for name, split in manifest.splits.items()}
    for name, counted in count_labels(ranges, manifest.days, manifest.arrays_in(folder)).items():
        if counted != manifest.splits[name]:
            yield (
                f"{folder}: {counted.positives} positive labels in {name}, the manifest says "
                f"{manifest.splits[name].positives}, base rate {manifest.splits[name].base_rate}"
            )


def _bad_ids(path: Path, start: int, ids: NDArray[Any], features: Sequence[int], manifest: Manifest) -> Iterator[str]:
    """The first id of a piece, int [n, columns], that its table does not have."""
    limits = np.array(manifest.num_embeddings)[features]
    bad = (ids < 0) | (ids >= limits)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        yield (
            f"{path}: row {start + row}: {FEATURE_NAMES[features[column]]} has id {ids[row, column]}, "
            f"expected 0 to {limits[column] - 1}"
        )


def _first(path: Path, start: int, bad: NDArray[Any], names: tuple[str, ...], what: str) -> Iterator[str]:
    """The first bad value of a piece, if there is one, and how many more."""
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        yield f"{path}: row {start + row}: {names[column]} is {what} ({int(bad.sum())} such values in this piece)"
