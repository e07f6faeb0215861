"""The fast parser against the reference parser: the same rows, or the same words about the same line."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparse2d.data.criteo import RawRows, fault, read_raw
from sparse2d.data.fastparse import parse
from sparse2d.errors import UserError

NAMES = ("labels", "dense", "dense_missing", "tokens", "tokens_missing")
INT64 = np.iinfo(np.int64)

integers = st.one_of(
    st.just(""),
    st.integers(-3, 30).map(str),
    st.integers(INT64.min - 3, INT64.min + 3).map(str),
    st.integers(INT64.max - 3, INT64.max + 3).map(str),
    st.integers(-(10**20), 10**20).map(str),
    st.text("-0123456789", max_size=22),
)
tokens = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map("{:08x}".format),
    st.integers(0, 2**32 - 1).map("{:X}".format),
    st.text("0123456789abcdefABCDEFg ", max_size=10),
)
labels = st.sampled_from(["0", "1", "1", "0", "", "2", "-1", "01"])


@st.composite
def near_lines(draw):
    """Lines of the grammar, and lines that are nearly so."""
    fields = [draw(labels), *(draw(integers) for _ in range(13)), *(draw(tokens) for _ in range(26))]
    kept = draw(st.sampled_from([40, 40, 40, 40, 39, 38, 41]))
    return "\t".join((fields * 2)[:kept]).encode() + draw(st.sampled_from([b"", b"", b"", b"\r", b" "]))


@st.composite
def good_lines(draw):
    dense = st.one_of(st.just(""), st.integers(INT64.min, INT64.max).map(str))
    token = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map("{:x}".format))
    fields = [draw(st.sampled_from("01")), *(draw(dense) for _ in range(13)), *(draw(token) for _ in range(26))]
    return "\t".join(fields).encode()


# The reference takes a file that starts like a gzip stream for one.
noise = st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"").replace(b"\x1f\x8b", b""))
lines_of_all_kinds = st.lists(st.one_of(good_lines(), near_lines(), noise), min_size=1, max_size=4)


def reference(tmp_path, text: bytes) -> RawRows:
    path = tmp_path / "rows"
    path.write_bytes(text)
    chunks = list(read_raw(path))
    return RawRows(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in NAMES))


def assert_same(left: RawRows, right: RawRows) -> None:
    for name in NAMES:
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@settings(max_examples=500)
@given(lines_of_all_kinds)
@example([b"0" + b"\t" * 39])
@example([b"1" + b"\t-9223372036854775808" * 13 + b"\tffffffff" * 26])
@example([b"1" + b"\t-9223372036854775809" * 13 + b"\tffffffff" * 26])
@example([b"1" + b"\t9223372036854775808" * 13 + b"\tffffffff" * 26])
@example([b"1" + b"\t18446744073709551616" * 13 + b"\t" * 26])
@example([b"1" + b"\t0000000000000000000" * 13 + b"\t0" * 26])
@example([b"1" + b"\t00000000000000000000" * 13 + b"\t0" * 26])
@example([b""])
def test_same_rows_or_same_refusal(tmp_path_factory, lines):
    text = b"\n".join(lines) + b"\n"
    try:
        expected = reference(tmp_path_factory.mktemp("raw"), text)
    except UserError as error:
        expected = str(error)
    got = parse(text)
    if got.rejects:
        line, reason = got.rejects[0]
        assert isinstance(expected, str)
        assert expected.endswith(f"rows:{line + 1}: {reason}")
    else:
        assert_same(got.rows, expected)
        assert got.num_lines == len(lines)


@settings(max_examples=200)
@given(lines_of_all_kinds)
def test_rejecting_leaves_exactly_the_good_lines(tmp_path_factory, lines):
    got = parse(b"\n".join(lines) + b"\n", most_rejects=len(lines))
    good = [line for line in lines if fault(line) is None]
    assert got.rejects == [(place, fault(line)) for place, line in enumerate(lines) if fault(line) is not None]
    assert got.num_lines == len(lines)
    assert len(got.rows) == len(good)
    if good:
        assert_same(got.rows, reference(tmp_path_factory.mktemp("raw"), b"\n".join(good)))


@settings(max_examples=300)
@given(good_lines(), st.integers(0, 500), st.binary(min_size=1, max_size=1))
def test_any_byte_anywhere(line, place, byte):
    text = bytearray(line)
    text[place % len(text)] = byte[0]
    got = parse(bytes(text) + b"\n", most_rejects=9)
    broken = [fault(part) is not None for part in bytes(text).split(b"\n")]
    assert [place for place, _ in got.rejects] == [place for place, bad in enumerate(broken) if bad]


def test_rejects_stop_at_one_too_many(line):
    text = (f"{line()}\nbad\n" * 10).encode()
    assert [place for place, _ in parse(text, most_rejects=3).rejects] == [1, 3, 5, 7]
    assert len(parse(text, most_rejects=10).rows) == 10


@pytest.mark.parametrize("value", [INT64.min, INT64.max, -1, 0])
def test_extreme_integers(line, value):
    assert parse(f"{line(1, {'I13': value})}\n".encode()).rows.dense[0, 12] == value


def test_importing_the_data_modules_does_not_import_numba():
    code = "import sys, sparse2d.data.dataset, sparse2d.data.prepare; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
