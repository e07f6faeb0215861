"""One day into three arrays: pieces are converted on all cores, and written in their order.

The order of the pieces, not of the threads, decides every byte of the output. A day's files and its record get their
names only once the day is complete, the record last; few pieces more than there are workers are in memory, however
long the day is.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_DENSE, NUM_SPARSE, DataConfig
from sparse2d.data.atomic import replacing, sync
from sparse2d.data.digests import sha256_of
from sparse2d.data.fastparse import Parsed
from sparse2d.data.ids import IdMap
from sparse2d.data.job import IngestJob
from sparse2d.data.manifest import PARTS, OutputFile, array_name
from sparse2d.data.mappings import map_dense
from sparse2d.data.npy import npy_appender
from sparse2d.data.progress import OnRows
from sparse2d.data.seen import SeenIds, count_true, widen
from sparse2d.data.sources import DaySource
from sparse2d.data.threads import in_order
from sparse2d.errors import UserError

_WIDTHS = {"dense": (np.float32, NUM_DENSE), "sparse": (np.int32, NUM_SPARSE), "labels": (np.int32, 1)}


@dataclass
class Piece:
    """Some consecutive rows as they are stored: ``dense`` float32 [n, 13], ``sparse`` int32 [n, 26], ``labels`` [n].

    ``num_lines`` counts the lines they come from, ``rejects`` are the bad ones as (place among them, reason).
    ``logits`` are the teacher's, of synthetic rows.
    """

    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.int32]
    dense_missing: NDArray[np.int64]
    sparse_missing: NDArray[np.int64]
    sparse_oov: NDArray[np.int64]
    num_lines: int
    rejects: list[tuple[int, str]]
    logits: NDArray[np.float64] | None


def to_piece(parsed: Parsed, data: DataConfig, ids: IdMap) -> Piece:
    """Map raw rows to what is stored."""
    rows = parsed.rows
    sparse, oov = ids(rows.tokens, rows.tokens_missing)
    return Piece(
        dense=map_dense(rows.dense, rows.dense_missing, data),
        sparse=sparse,
        labels=rows.labels,
        dense_missing=count_true(rows.dense_missing),
        sparse_missing=count_true(rows.tokens_missing),
        sparse_oov=oov,
        num_lines=parsed.num_lines,
        rejects=parsed.rejects,
        logits=parsed.logits,
    )


@dataclass(frozen=True)
class DayRecord:
    """A finished day; ``key`` stands for the options that decide its arrays, ``seen_bytes`` is that file's size."""

    day: int
    key: str
    rows: int
    source: dict[str, Any]
    files: dict[str, OutputFile]
    seen_bytes: int
    dense_min: list[float]
    dense_max: list[float]
    dense_missing: list[int]
    sparse_min: list[int]
    sparse_max: list[int]
    sparse_missing: list[int]
    sparse_oov: list[int]
    positives: int

    def write(self, folder: Path) -> None:
        """Write ``day_D.json``: from then on, the day is finished."""
        with replacing(folder / record_name(self.day)) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def record_name(day: int) -> str:
    """The file of a day's record."""
    return f"day_{day}.json"


def seen_name(day: int) -> str:
    """The file that says which ids occur in a day, one bit for each table row."""
    return f"day_{day}.seen.npy"


def read_record(folder: Path, day: int) -> DayRecord | None:
    """The record of a finished day, if there is one and its files are whole."""
    try:
        fields = json.loads((folder / record_name(day)).read_text(encoding="utf-8"))
        fields["files"] = {name: OutputFile(**file) for name, file in fields["files"].items()}
        record = DayRecord(**fields)
        sizes = {name: file.bytes for name, file in record.files.items()} | {seen_name(day): record.seen_bytes}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if whole else None


def ingest_day(job: IngestJob, source: DaySource, ids: IdMap, key: str, on_rows: OnRows) -> DayRecord:
    """Convert one day and write its arrays and record; ``on_rows`` hears of rows and of the share of the day done.

    Raises:
        UserError: for a bad line or a damaged file; then nothing of this day stands under its name.
    """
    day, folder, lines, first_fault = source.day, job.folder, 0, ""
    totals = _Totals(SeenIds(ids.num_embeddings))
    with ExitStack() as stack:
        temporary = {part: stack.enter_context(replacing(folder / array_name(day, part))) for part in PARTS}
        with ExitStack() as files:
            append = {p: files.enter_context(npy_appender(temporary[p], *_WIDTHS[p])) for p in PARTS}
            for piece, share in in_order(_converting(source, job.data, ids), job.pool, job.pieces_at_once):
                for place, reason in piece.rejects:
                    source.refuse(lines + place + 1, reason)
                    first_fault = first_fault or f", only bad lines, the first: {reason}"
                lines += piece.num_lines
                append["dense"](piece.dense)
                append["sparse"](piece.sparse)
                append["labels"](piece.labels[:, None])
                if piece.logits is not None:
                    source.teach(totals.rows, piece.logits, piece.labels)
                totals.add(piece)
                on_rows(len(piece.labels), share)
        if totals.rows == 0:
            raise UserError(f"{source.name}: 0 rows{first_fault}; give a raw Criteo file")
        outputs = {p: job.pool.submit(_output_file, temporary[p], totals.rows, *_WIDTHS[p]) for p in PARTS}
        for path in temporary.values():
            # While the digests are computed: the disk is not busy with them.
            sync(path)
        files_by_name = {array_name(day, part): future.result() for part, future in outputs.items()}
    with replacing(folder / seen_name(day)) as seen, seen.open("wb") as file:
        np.save(file, totals.seen.bits)
    seen_bytes = (folder / seen_name(day)).stat().st_size
    record = totals.record(day, key, source.described(), files_by_name, seen_bytes)
    record.write(folder)
    return record


def _converting(source: DaySource, data: DataConfig, ids: IdMap) -> Iterator[tuple[Callable[[], Piece], float]]:
    """The source's tasks, each followed by the mapping of its rows."""

    def convert(read: Callable[[], Parsed]) -> Piece:
        return to_piece(read(), data, ids)

    for read, share in source.tasks():
        yield partial(convert, read), share


class _Totals:
    """What is known of a day so far."""

    def __init__(self, seen: SeenIds) -> None:
        self.rows = self.positives = 0
        self.seen = seen
        self.dense_min = np.full(NUM_DENSE, np.inf, np.float32)
        self.dense_max = np.full(NUM_DENSE, -np.inf, np.float32)
        self.dense_missing = np.zeros(NUM_DENSE, np.int64)
        self.sparse_missing = np.zeros(NUM_SPARSE, np.int64)
        self.sparse_oov = np.zeros(NUM_SPARSE, np.int64)

    def add(self, piece: Piece) -> None:
        if len(piece.labels) == 0:
            return
        self.rows += len(piece.labels)
        self.positives += int(piece.labels.sum())
        self.seen.add(piece.sparse)
        widen(piece.dense, self.dense_min, self.dense_max)
        self.dense_missing += piece.dense_missing
        self.sparse_missing += piece.sparse_missing
        self.sparse_oov += piece.sparse_oov

    def record(
        self, day: int, key: str, source: dict[str, Any], files: dict[str, OutputFile], seen_bytes: int
    ) -> DayRecord:
        return DayRecord(
            day=day,
            key=key,
            rows=self.rows,
            source=source,
            files=files,
            seen_bytes=seen_bytes,
            dense_min=self.dense_min.tolist(),
            dense_max=self.dense_max.tolist(),
            dense_missing=self.dense_missing.tolist(),
            sparse_min=self.seen.smallest.tolist(),
            sparse_max=self.seen.largest.tolist(),
            sparse_missing=self.sparse_missing.tolist(),
            sparse_oov=self.sparse_oov.tolist(),
            positives=self.positives,
        )


def _output_file(path: Path, rows: int, dtype: Any, columns: int) -> OutputFile:
    return OutputFile(os.path.getsize(path), sha256_of(path), np.dtype(dtype).name, [rows, columns])
