"""Strict reader of raw Criteo click logs, and the one mapping from raw values to features.

A line is ``label I1..I13 C1..C26``: 40 fields between tabs, ended by a line feed that only the last line may lack.

- label: ``0`` or ``1``;
- I: empty (missing), or a decimal integer of 1 to 19 digits with an optional ``-``, within int64;
- C: empty (missing), or 1 to 8 hex digits of either case.

Everything else is refused with file and line number: blank lines, carriage returns, blanks around a value, ``+5``,
``0x1``, ``1_0``, digits outside ASCII. This module is the readable reference that faster readers are tested against.
"""

import gzip
import re
import zlib
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_DENSE, NUM_SPARSE
from sparse2d.errors import UserError

DENSE_NAMES = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
FEATURE_NAMES = tuple(f"C{i}" for i in range(1, NUM_SPARSE + 1))
NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE

DENSE_MAPPING = "log(max(x, -2) + 3) as float32; missing = 0"
SPARSE_MAPPING = "token modulo table rows; missing = row 0, merged with the tokens that are multiples of the table rows"

BLOCK_BYTES = 1 << 20

_LABEL = rb"[01]"
_INTEGER = rb"(?:-?[0-9]{1,19})?"
_TOKEN = rb"[0-9a-fA-F]{0,8}"
_FIELDS = (
    ("label", _LABEL, "0 or 1"),
    *((name, _INTEGER, "an integer or nothing") for name in DENSE_NAMES),
    *((name, _TOKEN, "1 to 8 hex digits or nothing") for name in FEATURE_NAMES),
)
_LINE = re.compile(b"\t".join(pattern for _, pattern, _ in _FIELDS))
LONGEST_LINE = 1 + NUM_DENSE * 21 + NUM_SPARSE * 9
_INT64 = np.iinfo(np.int64)
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class RawRows:
    """Consecutive raw rows, before any mapping; missing values are 0 under a True mask.

    ``labels`` int32 [n], ``dense`` int64 [n, 13], ``tokens`` uint32 [n, 26], masks bool of the same shapes.
    """

    labels: NDArray[np.int32]
    dense: NDArray[np.int64]
    dense_missing: NDArray[np.bool_]
    tokens: NDArray[np.uint32]
    tokens_missing: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)


def dense_features(values: NDArray[np.int64], missing: NDArray[np.bool_]) -> NDArray[np.float32]:
    """``log(max(x, -2) + 3)`` with missing = 0: finite for every int64, and the same in every file.

    The shift is fixed (never a file's own minimum), so that one raw row has one image whichever file it is in.
    """
    x = np.where(missing, 0, values).astype(np.float64)
    return np.log(np.maximum(x, -2.0) + 3.0).astype(np.float32)


def sparse_ids(
    tokens: NDArray[np.uint32], missing: NDArray[np.bool_], num_embeddings: Sequence[int]
) -> NDArray[np.int32]:
    """Token modulo table rows, [n, 26]; missing is row 0, merged with tokens that are multiples of the table rows."""
    return np.where(missing, 0, tokens % np.asarray(num_embeddings, dtype=np.uint32)).astype(np.int32)


def read_raw(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[RawRows]:
    """Yield the rows of a raw file, plain or gzip (told by its content), about ``block_bytes`` of text at a time.

    Raises:
        UserError: if the path is no file, there are no rows, a line breaks the grammar, or the gzip stream is damaged.
    """
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; give a raw Criteo file")
    with path.open("rb") as raw:
        magic = raw.read(len(_GZIP_MAGIC))
        raw.seek(0)
        text: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if magic == _GZIP_MAGIC else raw
        line_number = 1
        for lines in _blocks_of_lines(path, text, block_bytes):
            yield _parse(lines, path, line_number)
            line_number += len(lines)
    if line_number == 1:
        raise UserError(f"{path}: 0 rows (the file is empty); give a raw Criteo file")


def _blocks_of_lines(path: Path, text: BinaryIO | gzip.GzipFile, block_bytes: int) -> Iterator[list[bytes]]:
    """Yield whole lines without their line feeds."""
    rest = b""
    while True:
        try:
            block = text.read(block_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path}: damaged gzip stream ({error}); copy or download the file again") from error
        if not block:
            break
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LONGEST_LINE:
            # No line is that long: hand it over to be refused, rather than gather a file without line feeds in memory.
            lines, rest = [*lines, rest], b""
        if lines:
            yield lines
    if rest:
        yield [rest]


def _parse(lines: list[bytes], path: Path, first_line: int) -> RawRows:
    if not all(map(_LINE.fullmatch, lines)):
        raise _refusal(lines, path, first_line)
    cells = np.array(b"\t".join(lines).split(b"\t"), dtype=object).reshape(len(lines), NUM_FIELDS)
    dense, tokens = cells[:, 1 : 1 + NUM_DENSE], cells[:, 1 + NUM_DENSE :]
    try:
        values = np.array([int(text or b"0") for text in dense.flat], dtype=np.int64)
    except OverflowError:
        raise _refusal(lines, path, first_line) from None
    digits = unhexlify(b"".join([text.rjust(8, b"0") for text in tokens.flat]))
    return RawRows(
        labels=cells[:, 0].astype(np.int32),
        dense=values.reshape(dense.shape),
        dense_missing=dense == b"",
        tokens=np.frombuffer(digits, dtype=">u4").astype(np.uint32).reshape(tokens.shape),
        tokens_missing=tokens == b"",
    )


def _refusal(lines: list[bytes], path: Path, first_line: int) -> UserError:
    """The error that names the first line that breaks the grammar."""
    faults = ((number, fault(line)) for number, line in enumerate(lines, start=first_line))
    number, reason = next((number, reason) for number, reason in faults if reason)
    return UserError(f"{path}:{number}: {reason}")


def fault(line: bytes) -> str | None:
    """Say what is wrong with one line (without its line feed); None if nothing is."""
    if line.endswith(b"\r"):
        return r"Windows line end (carriage return); convert the file first: sed -i 's/\r$//' FILE"
    if not line:
        return "blank line"
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        return f"{len(fields)} fields, expected {NUM_FIELDS}{' (no label?)' if len(fields) == NUM_FIELDS - 1 else ''}"
    for field, (name, pattern, expected) in zip(fields, _FIELDS, strict=True):
        shown = ascii(field[:40])[1:]
        if not re.fullmatch(pattern, field):
            return f"{name} is {shown}, expected {expected}"
        if field and pattern is _INTEGER and not _INT64.min <= int(field) <= _INT64.max:
            return f"{name} is {shown}, expected a 64-bit integer"
    return None
