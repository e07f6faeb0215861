"""Where a day's rows come from: a raw file, or the planted teacher."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import DataConfig, OnBadLine
from sparse2d.data.criteo import RawRows
from sparse2d.data.fastparse import Parsed, parse
from sparse2d.data.raw import read_text
from sparse2d.data.splits import split_ranges
from sparse2d.data.synthetic import CHUNK_ROWS, Teacher, TeacherSums, plant_teacher
from sparse2d.errors import UserError


class DaySource(Protocol):
    """Where one day's rows come from, for one pass over them."""

    day: int
    name: str

    def tasks(self) -> Iterator[tuple[Callable[[], Parsed], float]]:
        """Functions that read the pieces, in order, and the share of the day that is read with each."""

    def described(self) -> dict[str, Any]:
        """What the manifest says of the source, once all tasks have been yielded."""

    def refuse(self, line: int, reason: str) -> None:
        """Hear of a bad line, counted from 1."""

    def teach(self, first_row: int, logits: NDArray[np.float64], labels: NDArray[np.int32]) -> None:
        """Hear of the teacher's logits, first_row being counted within the day."""


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
    """One raw file."""

    def __init__(self, day: int, path: Path, rejects: Rejects) -> None:
        self.day = day
        self.name = str(path)
        self._path = path
        self._rejects = rejects
        self._rejected: list[tuple[int, str]] = []
        self._digest = hashlib.sha256()

    def tasks(self) -> Iterator[tuple[Callable[[], Parsed], float]]:
        """See ``DaySource``."""
        size = max(self._path.stat().st_size, 1)
        for text, done in read_text(self._path, self._digest):
            yield partial(parse, text, self._rejects.most), done / size

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

    def __init__(self, day: int, rows: range, teacher: Teacher, splits: Mapping[str, range]) -> None:
        self.day = day
        self.name = f"synthetic day {day}"
        self._rows = rows
        self._teacher = teacher
        self._sums = {name: TeacherSums() for name in splits}
        self._splits = splits

    def tasks(self) -> Iterator[tuple[Callable[[], Parsed], float]]:
        """See ``DaySource``."""
        for index in range(self._rows.start // CHUNK_ROWS, -(-self._rows.stop // CHUNK_ROWS)):
            done = min((index + 1) * CHUNK_ROWS, self._rows.stop) - self._rows.start
            yield partial(self._chunk, index), done / len(self._rows)

    def _chunk(self, index: int) -> Parsed:
        start = index * CHUNK_ROWS
        mine = slice(max(self._rows.start - start, 0), self._rows.stop - start)
        rows, logits = self._teacher.raw_rows(index)
        rows = RawRows(
            rows.labels[mine], rows.dense[mine], rows.dense_missing[mine], rows.tokens[mine], rows.tokens_missing[mine]
        )
        return Parsed(rows, len(rows), logits=logits[mine])

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


def day_sources(data: DataConfig, inputs: Mapping[int, Path], rejects: Rejects) -> list[DaySource]:
    """All days, in order, for one pass; without inputs, the planted teacher's."""
    if inputs:
        return [RawDay(day, path, rejects) for day, path in inputs.items()]
    days = synthetic_days(data)
    splits = split_ranges([len(rows) for rows in days], data, "synthetic")
    teacher = plant_teacher(data.synthetic, data.table_rows)
    return [SyntheticDay(day, rows, teacher, splits) for day, rows in enumerate(days)]


def synthetic_days(data: DataConfig) -> list[range]:
    """The rows of each synthetic day, as equal as can be."""
    rows, days = data.synthetic.rows, data.synthetic.days
    bounds = [rows * day // days for day in range(days + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
