"""The rank slices of a dataset's global batches, from its memory maps.

A batch is a function of its step: a run that is resumed at step s (``start_step=s``) gets the batches that it would
have got, on any number of ranks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_DENSE, NUM_SPARSE
from sparse2d.data.arrays import Dataset, DayArrays, open_dataset
from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.manifest import array_name
from sparse2d.data.multihot import expand
from sparse2d.data.shuffle import ShuffledOrder
from sparse2d.errors import UserError

__all__ = [
    "Dataset",
    "RankBatch",
    "dropped_rows",
    "eval_batches",
    "num_eval_steps",
    "num_train_steps",
    "open_dataset",
    "prefetch",
    "train_batches",
]

T = TypeVar("T")


@dataclass(frozen=True)
class RankBatch:
    """One rank's rows of one step: ``dense`` float32 [b, 13], ``sparse`` int32 [b, 26], ``labels`` float32 [b].

    The first ``num_rows`` rows are real, ``first_row`` being the first one's place in the dataset, or, of shuffled
    rows, in their order; the rest is padding. Where features have several ids, ``sparse`` is [b, sum(hotness)].
    """

    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.float32]
    first_row: int
    num_rows: int
    hotness: tuple[int, ...] = (1,) * NUM_SPARSE


def num_train_steps(dataset: Dataset, global_batch_size: int, max_steps: int | None = None) -> int:
    """Whole global batches in one pass over the training rows, at most ``max_steps``."""
    steps = len(dataset.train) // global_batch_size
    return steps if max_steps is None else min(steps, max_steps)


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
    shuffle_seed: int | None = None,
    epoch: int = 0,
) -> Iterator[RankBatch]:
    """This rank's slices of steps ``[start_step, max_steps)`` of one pass, in time order or in a shuffled one.

    Step s is places ``[s * B, (s + 1) * B)`` of that order, whatever the number of ranks; rank r takes the r-th of
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
    order = None if shuffle_seed is None else ShuffledOrder(dataset.train, shuffle_seed, epoch)
    starts = (step * global_batch_size + rank * size for step in range(start_step, last_step))
    if order is None:
        return (_batch(dataset, dataset.train.start + start, size, dataset.train) for start in starts)
    return (_shuffled_batch(dataset, order, start, size) for start in starts)


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
    starts = (dataset.eval.start + (step * world_size + rank) * rank_batch_size for step in range(steps))
    return (_batch(dataset, start, rank_batch_size, dataset.eval) for start in starts)


def prefetch(batches: Iterator[T], depth: int = 2, together: int = 1) -> Iterator[T]:
    """The same items, made ahead on a thread, ``depth * together`` at most; an error comes where its item would have.

    The thread ends with the iterator: when it is exhausted, closed or collected.

    Args:
        batches: made on the thread, one after the other.
        depth: portions that are made ahead.
        together: items to a portion. To hand one over takes 0.2 ms, since both threads want the interpreter; a small
            batch is made in a tenth of that.
    """

    def make() -> tuple[list[T], Exception | None]:
        portion: list[T] = []
        try:
            portion.extend(islice(batches, together))
        except Exception as error:
            return portion, error
        return portion, None

    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(make) for _ in range(depth))
        while True:
            portion, error = ahead.popleft().result()
            ahead.append(pool.submit(make))
            yield from portion
            if error is not None:
                raise error
            if len(portion) < together:
                return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batch(dataset: Dataset, first_row: int, size: int, within: range) -> RankBatch:
    """Rows ``[first_row, first_row + size)``, those past the range replaced by its first row."""
    num_rows = max(0, min(size, within.stop - first_row))
    arrays = _Arrays(dataset, size)
    for day in dataset.days:
        start, stop = max(first_row, day.first_row), min(first_row + num_rows, day.first_row + day.rows)
        if start < stop:
            arrays.fill(
                slice(start - first_row, stop - first_row), day, slice(start - day.first_row, stop - day.first_row)
            )
    if num_rows < size:
        day = next(day for day in dataset.days if within.start < day.first_row + day.rows)
        row = within.start - day.first_row
        arrays.fill(slice(num_rows, size), day, slice(row, row + 1))
    return arrays.batch(first_row, num_rows, lambda place: first_row + place if place < num_rows else within.start)


def _shuffled_batch(dataset: Dataset, order: ShuffledOrder, start: int, size: int) -> RankBatch:
    rows = order.rows(start, start + size)
    arrays = _Arrays(dataset, size)
    for day in dataset.days:
        (places,) = np.nonzero((rows >= day.first_row) & (rows < day.first_row + day.rows))
        if len(places):
            arrays.fill(places, day, rows[places] - day.first_row)
    return arrays.batch(dataset.train.start + start, size, lambda place: int(rows[place]))


class _Arrays:
    """A batch being filled from the days that it spans.

    Its arrays are copies: a batch outlives the maps, and torch wants writable memory.
    """

    def __init__(self, dataset: Dataset, size: int) -> None:
        self._dataset = dataset
        self._stored = max(dataset.hotness) > 1 and dataset.days[0].multi_hot is not None
        self.dense = np.empty((size, NUM_DENSE), np.float32)
        self.sparse = np.empty((size, sum(dataset.hotness) if self._stored else NUM_SPARSE), np.int32)
        self.labels = np.empty(size, np.int32)

    def fill(self, places: Any, day: DayArrays, rows: Any) -> None:
        """Copy rows of a day to places of the batch."""
        self.dense[places] = day.dense[rows]
        self.labels[places] = day.labels[rows, 0]
        modulo = self._dataset.manifest.modulo
        if not self._stored and day.sparse is not None:
            ids = day.sparse[rows]
            self.sparse[places] = ids % np.array(self._dataset.num_embeddings) if modulo else ids
            return
        assert day.multi_hot is not None
        first = 0
        for array, limit in zip(day.multi_hot, self._dataset.num_embeddings, strict=True):
            ids = array[rows] if self._stored else array[rows, :1]
            self.sparse[places, first : first + ids.shape[1]] = ids % limit if modulo else ids
            first += ids.shape[1]

    def batch(self, first_row: int, num_rows: int, row_at: Callable[[int], int]) -> RankBatch:
        """The batch, checked; ``row_at`` tells the dataset's row at a place of the batch."""
        hotness = self._dataset.hotness
        check_batch(self._dataset, self.sparse, self.labels, row_at)
        sparse = self.sparse
        if max(hotness) > 1 and not self._stored:
            sparse = expand(sparse, hotness, self._dataset.num_embeddings)
        return RankBatch(self.dense, sparse, self.labels.astype(np.float32), first_row, num_rows, hotness)


def check_batch(
    dataset: Dataset, sparse: NDArray[np.int32], labels: NDArray[np.int32], row_at: Callable[[int], int]
) -> None:
    """Refuse ids, int32 [n, 26] or [n, sum(hotness)], beyond their tables, and labels, int32 [n], but 0 and 1.

    Raises:
        UserError: naming file, row and value; ``row_at`` tells the dataset's row at a place of the batch.
    """
    widths = dataset.hotness if sparse.shape[1] > NUM_SPARSE else (1,) * NUM_SPARSE
    # As unsigned, a negative id is beyond every limit: one comparison covers both ends.
    bad_ids = sparse.view(np.uint32) >= np.repeat(np.array(dataset.num_embeddings, np.uint32), widths)
    if bad_ids.any():
        place, column = np.argwhere(bad_ids)[0].tolist()
        feature = int(np.searchsorted(np.cumsum(widths), column, side="right"))
        raise UserError(
            f"{_where(dataset, row_at(place), 'sparse')}: {FEATURE_NAMES[feature]} has id {sparse[place, column]}, "
            f"expected 0 to {dataset.num_embeddings[feature] - 1}"
        )
    bad_labels = labels.view(np.uint32) > 1
    if bad_labels.any():
        place = int(bad_labels.argmax())
        raise UserError(f"{_where(dataset, row_at(place), 'labels')}: label {labels[place]}, expected 0 or 1")


def _where(dataset: Dataset, row: int, part: str) -> str:
    """The file that holds a row, and the row's place in it."""
    day = next(day for day in dataset.manifest.days if row < day.first_row + day.rows)
    folder = dataset.manifest.arrays_in(dataset.path)
    return f"{folder / array_name(day.day, part)}: row {row - day.first_row}"
