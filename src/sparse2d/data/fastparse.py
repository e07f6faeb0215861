"""The fast parser: the same rows or the same refusal as ``criteo.py``, compiled for this one grammar.

Text goes straight into preallocated arrays, without a Python object for a line or field. The compiled function holds no
lock, so that threads parse on all cores. It only tells that a line is bad: what is wrong with it is said by the
reference (``criteo.fault``), so that both refuse with the same words.
"""

from dataclasses import dataclass, field

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_DENSE, NUM_SPARSE
from sparse2d.data.criteo import RawRows, fault

_TAB, _FEED, _MINUS = np.uint8(ord("\t")), np.uint8(ord("\n")), np.uint8(ord("-"))
# Places are unsigned: a signed index costs a test for "from the end" at each byte, three times the time in all.
_PLACE = np.uintp
_REFUSED = _PLACE(0)
_ZERO, _NINE, _TEN = np.uint64(ord("0")), np.uint64(9), np.uint64(10)
_MOST_DIGITS = _PLACE(19)
_INT64_MAX = np.uint64(np.iinfo(np.int64).max)
_TOKEN_DIGITS = 8
_NO_DIGIT = np.uint32(0xFF)
_DIGIT_BITS = np.uint32(4)

_HEX = np.full(256, _NO_DIGIT, np.uint32)
for _text in "0123456789abcdefABCDEF":
    _HEX[ord(_text)] = int(_text, 16)


@dataclass(frozen=True)
class Parsed:
    """The rows of a piece of text; ``rejects`` are its bad lines, as (place among its ``num_lines`` from 0, reason).

    ``logits`` are the teacher's, float64 [n], where the rows are synthetic.
    """

    rows: RawRows
    num_lines: int
    rejects: list[tuple[int, str]] = field(default_factory=list)
    logits: NDArray[np.float64] | None = None


def parse(text: bytes, most_rejects: int = 0) -> Parsed:
    """Parse whole lines, each ended by a line feed; bad ones are left out and listed, up to one more than allowed."""
    buffer = np.frombuffer(text, np.uint8)
    # Not text.count(), which takes half as long as all of the parsing.
    num_lines = int(np.count_nonzero(buffer == _FEED))
    labels = np.empty(num_lines, np.int32)
    dense = np.empty((num_lines, NUM_DENSE), np.int64)
    dense_missing = np.empty((num_lines, NUM_DENSE), np.bool_)
    tokens = np.empty((num_lines, NUM_SPARSE), np.uint32)
    tokens_missing = np.empty((num_lines, NUM_SPARSE), np.bool_)
    rejects: list[tuple[int, str]] = []
    num_rows, start = 0, 0
    while len(rejects) <= most_rejects:
        num_rows, start = _parse(buffer, start, num_rows, labels, dense, dense_missing, tokens, tokens_missing)
        if start == len(text):
            break
        end = text.index(b"\n", start)
        line = num_rows + len(rejects)
        reason = fault(text[start:end])
        assert reason is not None, f"the reference accepts {text[start:end]!r}"
        rejects.append((line, reason))
        start = end + 1
    rows = slice(num_rows)
    kept = RawRows(labels[rows], dense[rows], dense_missing[rows], tokens[rows], tokens_missing[rows])
    return Parsed(kept, num_lines, rejects)


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _parse(
    text: NDArray[np.uint8],
    start: int,
    row: int,
    labels: NDArray[np.int32],
    dense: NDArray[np.int64],
    dense_missing: NDArray[np.bool_],
    tokens: NDArray[np.uint32],
    tokens_missing: NDArray[np.bool_],
) -> tuple[int, int]:
    """Parse from ``start`` until the end or a bad line; return the number of rows and where that line starts.

    The text ends with a line feed, which no field reads past: that bounds every index.
    """
    at, size = _PLACE(start), _PLACE(len(text))
    while at < size:
        line = at
        label = np.uint64(text[at]) - _ZERO
        if label > 1 or text[at + _PLACE(1)] != _TAB:
            return row, int(line)
        labels[row] = label
        at += _PLACE(2)
        for column in range(NUM_DENSE):
            dense[row, column], dense_missing[row, column], at = _integer(text, at)
            if at == _REFUSED:
                return row, int(line)
        for column in range(NUM_SPARSE):
            delimiter = _TAB if column < NUM_SPARSE - 1 else _FEED
            tokens[row, column], tokens_missing[row, column], at = _token(text, at, delimiter)
            if at == _REFUSED:
                return row, int(line)
        row += 1
    return row, int(at)


@numba.njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _integer(text: NDArray[np.uint8], at: np.uintp) -> tuple[np.int64, bool, np.uintp]:
    """Read one integer and its tab: the value, whether it is missing, and where the next field starts."""
    negative = text[at] == _MINUS
    if negative:
        at += _PLACE(1)
    first = at
    # 19 digits fit into 64 bits without a sign; whether they fit with one is seen at the end.
    magnitude = np.uint64(0)
    digit = np.uint64(text[at]) - _ZERO
    while digit <= _NINE:
        magnitude = magnitude * _TEN + digit
        at += _PLACE(1)
        digit = np.uint64(text[at]) - _ZERO
    missing = at == first
    if (
        text[at] != _TAB
        or at - first > _MOST_DIGITS
        or (negative and missing)
        or magnitude > _INT64_MAX + np.uint64(negative)
    ):
        return np.int64(0), False, _REFUSED
    return -np.int64(magnitude) if negative else np.int64(magnitude), missing, at + _PLACE(1)


@numba.njit(cache=True, nogil=True, boundscheck=False, inline="always")
def _token(text: NDArray[np.uint8], at: np.uintp, delimiter: np.uint8) -> tuple[np.uint32, bool, np.uintp]:
    """Read one token and its delimiter: the value, whether it is missing, and where the next field starts."""
    end = at + _PLACE(_TOKEN_DIGITS)
    if end < _PLACE(len(text)) and text[end] == delimiter:
        # The usual case, 8 digits, without a branch for each: a byte that is none leaves its high bits in ``seen``.
        seen, token = np.uint32(0), np.uint32(0)
        for place in range(_TOKEN_DIGITS):
            digit = _HEX[text[at + _PLACE(place)]]
            seen |= digit
            token = np.uint32(token << _DIGIT_BITS) | digit
        if seen < np.uint32(16):
            return token, False, end + _PLACE(1)
    first, token = at, np.uint32(0)
    digit = _HEX[text[at]]
    while digit != _NO_DIGIT:
        token = np.uint32(token << _DIGIT_BITS) | digit
        at += _PLACE(1)
        digit = _HEX[text[at]]
    if text[at] != delimiter or at - first > _PLACE(_TOKEN_DIGITS):
        return np.uint32(0), False, _REFUSED
    return token, at == first, at + _PLACE(1)
