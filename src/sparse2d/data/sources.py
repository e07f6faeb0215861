"""Where a day's rows come from: a raw file, or the planted teacher."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import DataConfig, OnBadLine
from sparse2d.data.criteo import RawRows
from sparse2d.data.fastparse import parse
from sparse2d.data.ids import IdMap
from sparse2d.data.ingest import Piece
from sparse2d.data.mappings import map_dense
from sparse2d.data.raw import read_text
from sparse2d.data.seen import count_true
from sparse2d.data.synthetic import CHUNK_ROWS, Teacher, TeacherSums
from sparse2d.errors import UserError


class Rejects:
    """How many bad lines all days together may have."""

    def __init__(self, data: DataConfig, so_far: int = 0) -> None:
        self.most = data.max_rejects if data.on_bad_line is OnBadLine.reject else 0
        self._strict = data.on_bad_line is OnBadLine.strict
        self._count = so_far
        self._lock = threading.Lock()
        if so_far > self.most:
            raise UserError(f"{so_far} bad lines in finished days, more than data.max_rejects={self.most}; raise it")

    def add(self, path: Path, line: int, reason: str) -> None:
        """Count one.

        Raises:
            UserError: if it is not allowed, or one too many.
        """
        with self._lock:
            self._count += 1
        if self._strict:
            raise UserError(f"{path}:{line}: {reason}")
        if self._count > self.most:
            raise UserError(f"{path}:{line}: {reason}; more bad lines than data.max_rejects={self.most}")


class RawDay:
    """One raw file, mapped by ``data`` and ``ids``."""

    def __init__(self, day: int, path: Path, data: DataConfig, ids: IdMap, rejects: Rejects) -> None:
        self.day = day
        self.name = str(path)
        self._path = path
        self._data = data
        self._ids = ids
        self._rejects = rejects
        self._rejected: list[tuple[int, str]] = []
        self._digest = hashlib.sha256()

    def tasks(self) -> Iterator[tuple[Callable[[], Piece], float]]:
        """See ``DaySource``."""
        size = max(self._path.stat().st_size, 1)
        for text, done in read_text(self._path, self._digest):
            yield partial(self._piece, text), done / size

    def _piece(self, text: bytes) -> Piece:
        parsed = parse(text, self._rejects.most)
        piece = to_piece(parsed.rows, self._data, self._ids)
        piece.rejects.extend(parsed.rejects)
        piece.num_lines = parsed.num_lines
        return piece

    def described(self) -> dict[str, Any]:
        """See ``DaySource``."""
        return {
            "file": self._path.name,
            "bytes": self._path.stat().st_size,
            "sha256": self._digest.hexdigest(),
            "rejected": self._rejected,
        }

    def refuse(self, line: int, reason: str) -> None:
        """See ``DaySource``."""
        self._rejects.add(self._path, line, reason)
        self._rejected.append((line, reason))

    def teach(self, first_row: int, logits: NDArray[np.float64], labels: NDArray[np.int32]) -> None:
        """Raw rows have no teacher."""


class SyntheticDay:
    """Rows ``rows`` of the planted teacher's endless sequence."""

    def __init__(
        self, day: int, rows: range, teacher: Teacher, data: DataConfig, ids: IdMap, splits: Mapping[str, range]
    ) -> None:
        self.day = day
        self.name = f"synthetic day {day}"
        self._rows = rows
        self._teacher = teacher
        self._data = data
        self._ids = ids
        self._sums = {name: TeacherSums() for name in splits}
        self._splits = splits

    def tasks(self) -> Iterator[tuple[Callable[[], Piece], float]]:
        """See ``DaySource``."""
        for index in range(self._rows.start // CHUNK_ROWS, -(-self._rows.stop // CHUNK_ROWS)):
            done = min((index + 1) * CHUNK_ROWS, self._rows.stop) - self._rows.start
            yield partial(self._piece, index), done / len(self._rows)

    def _piece(self, index: int) -> Piece:
        start = index * CHUNK_ROWS
        mine = slice(max(self._rows.start - start, 0), self._rows.stop - start)
        rows, logits = self._teacher.raw_rows(index)
        rows = RawRows(
            rows.labels[mine], rows.dense[mine], rows.dense_missing[mine], rows.tokens[mine], rows.tokens_missing[mine]
        )
        piece = to_piece(rows, self._data, self._ids)
        piece.logits = logits[mine]
        return piece

    def described(self) -> dict[str, Any]:
        """See ``DaySource``."""
        return {"teacher": {name: sums.values() for name, sums in self._sums.items()}}

    def refuse(self, line: int, reason: str) -> None:
        """The teacher writes no bad line."""
        raise AssertionError(f"line {line}: {reason}")

    def teach(self, first_row: int, logits: NDArray[np.float64], labels: NDArray[np.int32]) -> None:
        """See ``DaySource``."""
        first_row += self._rows.start
        for name, split in self._splits.items():
            part = slice(max(split.start - first_row, 0), max(split.stop - first_row, 0))
            self._sums[name].add(logits[part], labels[part])


def to_piece(rows: RawRows, data: DataConfig, ids: IdMap) -> Piece:
    """Map raw rows to what is stored."""
    sparse, oov = ids(rows.tokens, rows.tokens_missing)
    return Piece(
        dense=map_dense(rows.dense, rows.dense_missing, data),
        sparse=sparse,
        labels=rows.labels,
        dense_missing=count_true(rows.dense_missing),
        sparse_missing=count_true(rows.tokens_missing),
        sparse_oov=oov,
        num_lines=len(rows),
    )


def synthetic_days(rows: int, days: int) -> list[range]:
    """The rows of each of ``days`` days, as equal as can be."""
    bounds = [rows * day // days for day in range(days + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
