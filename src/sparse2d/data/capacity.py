"""What an ingest needs, told and checked before it starts."""

import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import psutil

from sparse2d.config import NUM_DENSE, NUM_SPARSE
from sparse2d.data.counting import COUNTING_BYTES, SLOT_BYTES
from sparse2d.data.criteo import fault
from sparse2d.data.raw import PIECE_BYTES, read_text
from sparse2d.errors import UserError
from sparse2d.units import size

log = logging.getLogger(__name__)

ROW_BYTES = 4 * (NUM_DENSE + NUM_SPARSE + 1)
# Measured: text, parsed and mapped rows of one piece, with what NumPy needs meanwhile.
_PIECE_MEMORY = 8 * PIECE_BYTES
_BASE_MEMORY = 300 << 20
# A token of a vocabulary: itself, and its 8 bytes in a hash table that is at most half and at least a quarter full.
_TOKEN_MEMORY = 4 + 4 * 8
# A token that is counted, in such a table.
_COUNT_MEMORY = 4 * SLOT_BYTES
# Decompressors read ahead: a longer sample makes little of it.
_SAMPLE_PIECES = 32


@dataclass(frozen=True)
class Needs:
    """Estimated rows of an ingest, and the disk and memory it takes in bytes."""

    rows: int
    disk: int
    memory: int


def estimate(rows: int, days: int, workers: int, num_embeddings: Sequence[int]) -> Needs:
    """The needs of ``rows`` rows in ``days`` days."""
    bits = sum(num_embeddings) // 8
    at_once = min(days, workers)
    pieces = at_once * (workers + 2) + workers
    memory = _BASE_MEMORY + pieces * _PIECE_MEMORY + at_once * bits
    return Needs(rows, rows * ROW_BYTES + days * bits, memory)


def with_vocabulary(needs: Needs, tokens: int, counted_rows: int) -> Needs:
    """Those, where ids come from a vocabulary of so many tokens, which is fitted on so many rows first, if any.

    The runs of counting are gone from the disk when the arrays come.
    """
    memory = needs.memory + tokens * _TOKEN_MEMORY
    # Measured: tables that are sorted and merged, or written out, take a third of the budget beside it.
    counting = min(COUNTING_BYTES, counted_rows * NUM_SPARSE * _COUNT_MEMORY) * 3 // 2
    memory = max(memory, needs.memory + counting)
    return replace(needs, memory=memory, disk=needs.disk + tokens * 4)


def estimate_rows(path: Path) -> tuple[int, bool]:
    """Rows of a raw file, from its first lines and how well they are compressed; true if it was read to its end."""
    pieces = read_text(path, hashlib.sha256())
    sample = [(text.count(b"\n"), done) for text, done in islice(pieces, _SAMPLE_PIECES)]
    lines = sum(count for count, _ in sample)
    if next(pieces, None) is None:
        return lines, True
    _, done = sample[-1]
    return round(path.stat().st_size / done * lines), False


def refuse_bad_line(path: Path) -> None:
    """Read a raw file of a few lines.

    Raises:
        UserError: naming the first line that is no row, if there is one.
    """
    number = 0
    for text, _ in read_text(path, hashlib.sha256()):
        for line in text.splitlines():
            number += 1
            if (reason := fault(line)) is not None:
                raise UserError(f"{path}:{number}: {reason}")


def check(needs: Needs, folder: Path) -> None:
    """Tell the needs.

    Raises:
        UserError: if the disk or the memory is too small.
    """
    free_disk, free_memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    log.info(
        "about %d rows: needs %s of disk at %s (%s free) and %s of memory (%s free)",
        needs.rows,
        size(needs.disk),
        folder,
        size(free_disk),
        size(needs.memory),
        size(free_memory),
    )
    if needs.disk > free_disk:
        raise UserError(
            f"about {needs.rows} rows need {size(needs.disk)} of disk, {folder} has {size(free_disk)} free; "
            "make room or set data.out_dir"
        )
    if needs.memory > free_memory:
        raise UserError(
            f"{size(needs.memory)} of memory are needed, {size(free_memory)} are free; lower data.workers or "
            "data.max_table_rows"
        )
