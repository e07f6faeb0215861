"""A prepared dataset opened for training, and the rank slices of its global batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.manifest import DENSE, LABELS, SPARSE, Manifest, Split, read_manifest
from sparse2d.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """Memory-mapped rows: ``dense`` float32 [rows, 13], ``sparse`` int32 [rows, 26], ``labels`` int32 [rows, 1].

    ``train`` and ``eval`` are the row ranges in use; ``base_rate`` is the share of positives among the former.
    """

    path: Path
    manifest: Manifest
    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.int32]
    train: range
    eval: range
    base_rate: float

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


@dataclass(frozen=True)
class RankBatch:
    """One rank's rows of one step: ``dense`` float32 [b, 13], ``sparse`` int32 [b, 26], ``labels`` float32 [b].

    The first ``num_rows`` rows are real, ``first_row`` being the first one's place in the dataset; the rest is padding.
    """

    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.float32]
    first_row: int
    num_rows: int


def open_dataset(path: Path | str, train_rows: int | None = None, eval_rows: int | None = None) -> Dataset:
    """Open a prepared folder and check what can be known before training; null uses all rows of a split.

    Raises:
        UserError: if a file is missing or not as the manifest says, an id or label is out of range, or there are fewer
            rows than asked for.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    manifest.check_files(folder)
    dense, sparse, labels = (_open_array(folder, name, manifest) for name in (DENSE, SPARSE, LABELS))
    _check_ranges(folder, manifest)
    train = _rows_in_use("train", manifest.splits["train"], train_rows)
    base_rate = float(np.mean(labels[train.start : train.stop]))
    if not 0.0 < base_rate < 1.0:
        raise UserError(
            f"{folder}: the first {len(train)} training rows all have label {int(base_rate)}, so that normalized "
            "entropy is undefined; raise data.train_rows"
        )
    return Dataset(
        path=folder,
        manifest=manifest,
        dense=dense,
        sparse=sparse,
        labels=labels,
        train=train,
        eval=_rows_in_use("eval", manifest.splits["eval"], eval_rows),
        base_rate=base_rate,
    )


def num_train_steps(dataset: Dataset, global_batch_size: int) -> int:
    """Whole global batches in one pass over the training rows."""
    return len(dataset.train) // global_batch_size


def dropped_rows(dataset: Dataset, global_batch_size: int) -> int:
    """Training rows at the end that fill no global batch."""
    return len(dataset.train) % global_batch_size


def num_eval_steps(dataset: Dataset, rank_batch_size: int, world_size: int) -> int:
    """Evaluation steps, the same on every rank."""
    return -(-len(dataset.eval) // (rank_batch_size * world_size))


def train_batches(
    dataset: Dataset,
    global_batch_size: int,
    rank: int,
    world_size: int,
    start_step: int = 0,
    max_steps: int | None = None,
) -> Iterator[RankBatch]:
    """This rank's slices of steps ``[start_step, max_steps)`` of one pass, in time order.

    Step s is training rows ``[s * B, (s + 1) * B)``, whatever the number of ranks; rank r takes the r-th of
    ``world_size`` equal contiguous slices. Rows that fill no batch are dropped (``dropped_rows``).

    Raises:
        UserError: at once, if B is no multiple of ``world_size`` or there is no whole batch; with the batch, if it
            holds an id or label out of range.
    """
    if global_batch_size < 1 or global_batch_size % world_size:
        raise UserError(f"global_batch_size={global_batch_size} is not a positive multiple of {world_size} ranks")
    steps = num_train_steps(dataset, global_batch_size)
    if steps == 0:
        raise UserError(
            f"{len(dataset.train)} training rows fill no batch of global_batch_size={global_batch_size}; lower it"
        )
    last_step = steps if max_steps is None else min(steps, max_steps)
    size = global_batch_size // world_size
    first = dataset.train.start + rank * size
    return (
        _batch(dataset, first + step * global_batch_size, size, dataset.train) for step in range(start_step, last_step)
    )


def eval_batches(dataset: Dataset, rank_batch_size: int, rank: int, world_size: int) -> Iterator[RankBatch]:
    """This rank's evaluation batches; all ranks together see every evaluation row once, in the same number of steps.

    A step covers ``world_size * R`` consecutive rows, rank r taking the r-th R of them. Where rows run out, the first
    evaluation row pads the batch to R and ``num_rows`` says how many are real (none, maybe): no rank waits for another,
    and no padding is scored.

    Raises:
        UserError: at once, if R is below 1; with the batch, if it holds an id or label out of range.
    """
    if rank_batch_size < 1:
        raise UserError(f"eval_batch_size={rank_batch_size}, expected at least 1")
    steps = num_eval_steps(dataset, rank_batch_size, world_size)
    return (
        _batch(
            dataset,
            dataset.eval.start + (step * world_size + rank) * rank_batch_size,
            rank_batch_size,
            dataset.eval,
        )
        for step in range(steps)
    )


def _batch(dataset: Dataset, first_row: int, size: int, within: range) -> RankBatch:
    """Rows ``[first_row, first_row + size)``, those past the range replaced by its first row."""
    num_rows = max(0, min(size, within.stop - first_row))
    rows = slice(first_row, first_row + num_rows)
    padding = np.full(size - num_rows, within.start)
    dense, sparse, labels = (
        # Copies: a batch outlives the map, and torch wants writable memory.
        np.concatenate([array[rows], array[padding]])
        for array in (dataset.dense, dataset.sparse, dataset.labels[:, 0])
    )
    _check_batch(dataset, sparse, labels, first_row)
    return RankBatch(dense, sparse, labels.astype(np.float32), first_row, num_rows)


def _check_batch(dataset: Dataset, sparse: NDArray[np.int32], labels: NDArray[np.int32], first_row: int) -> None:
    # As unsigned, a negative id is beyond every limit: one comparison covers both ends.
    bad_ids = sparse.view(np.uint32) >= np.array(dataset.num_embeddings, dtype=np.uint32)
    if bad_ids.any():
        row, column = np.argwhere(bad_ids)[0].tolist()
        raise UserError(
            f"{dataset.path / SPARSE}: row {first_row + row}: {FEATURE_NAMES[column]} has id {sparse[row, column]}, "
            f"expected 0 to {dataset.num_embeddings[column] - 1}"
        )
    bad_labels = labels.view(np.uint32) > 1
    if bad_labels.any():
        row = int(bad_labels.argmax())
        raise UserError(f"{dataset.path / LABELS}: row {first_row + row}: label {labels[row]}, expected 0 or 1")


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
        if low < 0 or high >= limit:
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
