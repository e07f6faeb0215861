"""How often each token occurs and where first, exact, in bounded memory.

Tokens are counted in hash tables, one for each column, by as many threads as there are: neither the order of the rows
nor the moment when a table is written out changes what is counted. When the tables have grown to the budget, the
largest one is written to disk as a run sorted by token, and starts anew. In the end the runs of a column are merged,
one range of tokens after another.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE
from sparse2d.data.hashtable import empty_slots, slot_of

COUNTING_BYTES = 1 << 30

SLOT_BYTES = 4 + 8 + 8
_MERGE_ENTRIES = 1 << 20

# Tokens in rising order, how often each occurs, and where first.
Run = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]


@dataclass
class _Table:
    keys: NDArray[np.uint32] = field(default_factory=lambda: empty_slots(0))
    counts: NDArray[np.int64] = field(init=False)
    firsts: NDArray[np.int64] = field(init=False)
    used: int = 0

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.keys), np.int64)
        self.firsts = np.zeros(len(self.keys), np.int64)

    def is_full(self) -> bool:
        """Whether one more token would fill more than half of the slots."""
        return 2 * (self.used + 1) > len(self.keys)

    def grown(self) -> "_Table":
        """The same counts in twice the slots."""
        larger = _Table(empty_slots(2 * len(self.keys)), used=self.used)
        _move(self.keys, self.counts, self.firsts, larger.keys, larger.counts, larger.firsts)
        return larger

    def run(self) -> Run:
        """The counts, sorted by token."""
        (slots,) = np.nonzero(self.counts)
        slots = slots[np.argsort(self.keys[slots])]
        return self.keys[slots], self.counts[slots], self.firsts[slots]


class TokenCounts:
    """Counts of the tokens of 26 columns, in about ``most_bytes`` of memory and runs in ``folder``."""

    def __init__(self, folder: Path, most_bytes: int = COUNTING_BYTES) -> None:
        self._folder = folder
        self._most_slots = max(most_bytes // SLOT_BYTES, 1)
        self._tables = [_Table() for _ in range(NUM_SPARSE)]
        self._num_runs = [0] * NUM_SPARSE
        # Whoever makes room may wait for a column, never the other way round.
        self._room = threading.Lock()
        self._columns = [threading.Lock() for _ in range(NUM_SPARSE)]

    def add(self, tokens: NDArray[np.uint32], missing: NDArray[np.bool_], first_place: int) -> None:
        """Count the tokens of some rows, uint32 [n, 26], the first one's place being ``first_place``."""
        for column in range(NUM_SPARSE):
            row = 0
            while row < len(tokens):
                with self._columns[column]:
                    table = self._tables[column]
                    row, table.used = _count(
                        tokens, missing, column, row, first_place, table.keys, table.counts, table.firsts, table.used
                    )
                if row < len(tokens):
                    with self._room:
                        self._make_room(column)

    def _make_room(self, column: int) -> None:
        """Let a full table grow, or write out the largest until it may."""
        while self._tables[column].is_full():
            slots = [len(table.keys) for table in self._tables]
            # While a table moves, both its copies are there.
            may_grow = sum(slots) + 2 * slots[column] <= self._most_slots
            chosen = column if may_grow else int(np.argmax([table.used for table in self._tables]))
            with self._columns[chosen]:
                if may_grow:
                    self._tables[chosen] = self._tables[chosen].grown()
                else:
                    self._spill(chosen)

    def _spill(self, column: int) -> None:
        arrays: tuple[NDArray[Any], ...] = self._tables[column].run()
        for name, array in zip(self._run_names(column, self._num_runs[column]), arrays, strict=True):
            array.tofile(self._folder / name)
        self._num_runs[column] += 1
        self._tables[column] = _Table()

    @staticmethod
    def _run_names(column: int, run: int) -> list[str]:
        return [f"run_{column}_{run}_{what}.bin" for what in ("tokens", "counts", "firsts")]

    def frequent(self, column: int, at_least: int, merge_entries: int = _MERGE_ENTRIES) -> NDArray[np.uint32]:
        """Take a column's tokens that occur at least so often, by the place where they first do; its table is freed."""
        runs: list[Run] = [self._tables[column].run()]
        self._tables[column] = _Table()
        for run in range(self._num_runs[column]):
            # No .npy files: numpy reads their headers with ast.literal_eval, which in CPython 3.11 fails now and then
            # when threads do it at once ("AST constructor recursion depth mismatch").
            tokens, counts, firsts = (self._folder / name for name in self._run_names(column, run))
            written = (
                np.memmap(tokens, np.uint32, "r"),
                np.memmap(counts, np.int64, "r"),
                np.memmap(firsts, np.int64, "r"),
            )
            runs.append(written)
        ranges = -(-sum(len(tokens) for tokens, _, _ in runs) // merge_entries) or 1
        bounds = np.linspace(0, 2**32, ranges + 1).astype(np.uint64)
        places = [np.searchsorted(tokens, bounds) for tokens, _, _ in runs]
        parts = [
            _merge([tuple(a[at[i] : at[i + 1]] for a in run) for run, at in zip(runs, places, strict=True)], at_least)
            for i in range(ranges)
        ]
        kept = np.concatenate([tokens for tokens, _ in parts])
        return kept[np.argsort(np.concatenate([firsts for _, firsts in parts]))]


def _merge(runs: list[tuple[NDArray[np.generic], ...]], at_least: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Tokens that occur at least so often in all runs together, and where first."""
    tokens, counts, firsts = (np.concatenate(arrays) for arrays in zip(*runs, strict=True))
    if len(tokens) == 0:
        return tokens, firsts
    order = np.argsort(tokens, kind="stable")
    tokens, counts, firsts = tokens[order], counts[order], firsts[order]
    starts = np.flatnonzero(np.append(True, tokens[1:] != tokens[:-1]))
    frequent = np.add.reduceat(counts, starts) >= at_least
    return tokens[starts][frequent], np.minimum.reduceat(firsts, starts)[frequent]


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _count(
    tokens: NDArray[np.uint32],
    missing: NDArray[np.bool_],
    column: int,
    row: int,
    first_place: int,
    keys: NDArray[np.uint32],
    counts: NDArray[np.int64],
    firsts: NDArray[np.int64],
    used: int,
) -> tuple[int, int]:
    """Count one column from ``row`` until the end or a half-full table; return where it stopped and the slots used."""
    while row < len(tokens):
        if not missing[row, column]:
            token = tokens[row, column]
            slot = slot_of(token, keys, counts)
            place = first_place + row
            if counts[slot] == 0:
                if 2 * (used + 1) > len(keys):
                    return row, used
                used += 1
                keys[slot] = token
                firsts[slot] = place
            counts[slot] += 1
            firsts[slot] = min(firsts[slot], place)
        row += 1
    return row, used


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _move(
    keys: NDArray[np.uint32],
    counts: NDArray[np.int64],
    firsts: NDArray[np.int64],
    new_keys: NDArray[np.uint32],
    new_counts: NDArray[np.int64],
    new_firsts: NDArray[np.int64],
) -> None:
    for slot in range(len(keys)):
        if counts[slot]:
            new = slot_of(keys[slot], new_keys, new_counts)
            new_keys[new], new_counts[new], new_firsts[new] = keys[slot], counts[slot], firsts[slot]
