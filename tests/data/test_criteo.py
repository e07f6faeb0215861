"""The raw reader against the format's definition, a slow second parser, and pandas."""

import gzip
import io
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse2d.data.criteo import DENSE_NAMES, FEATURE_NAMES, RawRows, dense_features, read_raw, sparse_ids
from sparse2d.errors import UserError

INT64 = np.iinfo(np.int64)


def read(path: Path, **options) -> RawRows:
    chunks = list(read_raw(path, **options))
    fields = ("labels", "dense", "dense_missing", "tokens", "tokens_missing")
    return RawRows(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in fields))


def assert_same(left: RawRows, right: RawRows) -> None:
    for name in ("labels", "dense", "dense_missing", "tokens", "tokens_missing"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


dense_values = st.one_of(st.none(), st.integers(-3, 3), st.integers(INT64.min, INT64.max))
token_values = st.one_of(st.none(), st.integers(0, 2**32 - 1))
raw_rows = st.tuples(
    st.integers(0, 1),
    st.lists(dense_values, min_size=13, max_size=13),
    st.lists(token_values, min_size=26, max_size=26),
)


def to_text(row, token_format: str = "08x") -> str:
    label, dense, tokens = row
    fields = [label, *("" if x is None else x for x in dense)]
    fields += ["" if t is None else format(t, token_format) for t in tokens]
    return "\t".join(map(str, fields))


@given(
    rows=st.lists(raw_rows, min_size=1, max_size=6),
    block_bytes=st.integers(1, 3000),
    zipped=st.booleans(),
    ended=st.booleans(),
    token_format=st.sampled_from(["08x", "08X", "x"]),
)
def test_written_values_come_back(tmp_path_factory, rows, block_bytes, zipped, ended, token_format):
    text = ("\n".join(to_text(row, token_format) for row in rows) + "\n" * ended).encode()
    path = tmp_path_factory.mktemp("raw") / "rows"
    path.write_bytes(gzip.compress(text) if zipped else text)
    got = read(path, block_bytes=block_bytes)
    assert got.labels.tolist() == [label for label, _, _ in rows]
    assert got.dense.tolist() == [[x or 0 for x in dense] for _, dense, _ in rows]
    assert got.dense_missing.tolist() == [[x is None for x in dense] for _, dense, _ in rows]
    assert got.tokens.tolist() == [[t or 0 for t in tokens] for _, _, tokens in rows]
    assert got.tokens_missing.tolist() == [[t is None for t in tokens] for _, _, tokens in rows]
    assert [x.dtype for x in (got.labels, got.dense, got.tokens)] == [np.int32, np.int64, np.uint32]


def is_valid(line: str) -> bool:
    """The format, said again without patterns."""

    def is_integer(text: str) -> bool:
        digits = text.removeprefix("-")
        return 1 <= len(digits) <= 19 and set(digits) <= set("0123456789") and -(2**63) <= int(text) < 2**63

    def is_token(text: str) -> bool:
        return len(text) <= 8 and set(text) <= set("0123456789abcdefABCDEF")

    label, *rest = line.split("\t")
    return (
        len(rest) == 39
        and label in ("0", "1")
        and all(not text or is_integer(text) for text in rest[:13])
        and all(is_token(text) for text in rest[13:])
    )


edits = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from(["insert", "replace", "delete"]),
        st.sampled_from("\t019-+_ xafG.\r\0\u0661\xe9"),
    ),
    max_size=3,
)


@given(row=raw_rows, edits=edits)
def test_edited_lines_are_read_or_refused_as_the_format_says(tmp_path_factory, row, edits):
    text = to_text(row)
    for place, kind, character in edits:
        place %= len(text) + 1
        text = text[:place] + (character if kind != "delete" else "") + text[place + (kind != "insert") :]
    good = to_text((0, [None] * 13, [None] * 26))
    path = tmp_path_factory.mktemp("raw") / "rows.tsv"
    path.write_text(f"{good}\n{text}\n{good}\n", newline="")
    if is_valid(text):
        label, *rest = text.split("\t")
        got = read(path)
        assert got.labels.tolist() == [0, int(label), 0]
        assert got.dense[1].tolist() == [int(x) if x else 0 for x in rest[:13]]
        assert got.tokens[1].tolist() == [int(t, 16) if t else 0 for t in rest[13:]]
    else:
        with pytest.raises(UserError, match=r"rows\.tsv:2: "):
            read(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("\t".join(["0"] * 38), "38 fields, expected 40$"),
        ("\t".join([""] * 39), r"39 fields, expected 40 \(no label\?\)$"),
        ("\t".join(["0"] * 41), "41 fields, expected 40$"),
        ("", "blank line"),
        ("{label=2}", "label is '2', expected 0 or 1"),
        ("{label=-1}", "label is '-1'"),
        ("{label=0.5}", r"label is '0\.5'"),
        ("{label=}", "label is ''"),
        ("{I3=1.5}", r"I3 is '1\.5', expected an integer or nothing"),
        ("{I3=+5}", "I3 is '\\+5'"),
        ("{I3=1_0}", "I3 is '1_0'"),
        ("{I3= 1}", "I3 is ' 1'"),
        ("{I3=-}", "I3 is '-'"),
        ("{I3=\uff11}", "I3 is "),
        ("{I3=9223372036854775808}", "I3 is '9223372036854775808', expected a 64-bit integer"),
        ("{I3=-9223372036854775809}", "I3 is '-9223372036854775809', expected a 64-bit integer"),
        ("{I3=nan}", "I3 is 'nan'"),
        ("{C7=0x1}", "C7 is '0x1', expected 1 to 8 hex digits or nothing"),
        ("{C7=+5}", "C7 is '\\+5'"),
        ("{C7=1_0}", "C7 is '1_0'"),
        ("{C7= 1}", "C7 is ' 1'"),
        ("{C7=\uff11}", "C7 is "),
        ("{C7=0000000a0}", "C7 is '0000000a0'"),
        ("{C7=g}", "C7 is 'g'"),
        ("{C26=a\r}", "Windows line end"),
        ("\t" * 100_000, r"\d{3,6} fields, expected 40$"),
        ("0" * 2_000_000, "1 fields, expected 40$"),
    ],
)
def test_bad_line_is_refused_with_file_and_line_number(tmp_path, line, bad, message):
    if bad.startswith("{"):
        name, value = bad[1:-1].split("=")
        bad = line(value) if name == "label" else line(0, {name: value})
    path = tmp_path / "train.tsv"
    path.write_text("\n".join([line()] * 16 + [bad] + [line(7)]) + "\n", newline="")
    for block_bytes in (50, 1000, 1 << 20):
        with pytest.raises(UserError, match=r"/train\.tsv:17: " + message) as error:
            read(path, block_bytes=block_bytes)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300 + len(str(path))


def test_last_bad_line_and_line_without_feed_are_seen(tmp_path, line):
    path = tmp_path / "train.tsv"
    path.write_text(f"{line()}\n{line()}\t9")
    with pytest.raises(UserError, match=r"train\.tsv:2: 41 fields"):
        read(path)


def test_hex_tokens_are_kept_exactly(line, write_lines):
    tokens = {
        "C1": "5e100000",
        "C2": "00000012",
        "C3": "ffffffff",
        "C4": "00000000",
        "C5": "",
        "C6": "1e5",
        "C7": "DEADbeef",
    }
    got = read(write_lines([line(0, tokens)]))
    assert got.tokens[0, :7].tolist() == [0x5E100000, 0x12, 0xFFFFFFFF, 0, 0, 0x1E5, 0xDEADBEEF]
    assert got.tokens_missing[0, :7].tolist() == [False, False, False, False, True, False, False]


def test_unlabelled_test_file_is_refused(line, write_lines):
    with pytest.raises(UserError, match=r"test\.txt:1: 39 fields, expected 40 \(no label\?\)"):
        read(write_lines([line().split("\t", 1)[1]] * 3, name="test.txt"))


def test_missing_folder_and_empty_files_are_refused(tmp_path):
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    for name, message in {
        "none.tsv": "does not exist",
        ".": "is not a file",
        "empty.tsv": "0 rows",
        "empty.gz": "0 rows",
    }.items():
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


def test_gzip_is_told_by_content_not_by_name(tmp_path, line):
    text = "".join(f"{line(i % 2, {'I1': i})}\n" for i in range(200)).encode()
    (tmp_path / "plain.gz").write_bytes(text)
    # Two members, as parallel compressors write.
    (tmp_path / "zipped.tsv").write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
    assert_same(read(tmp_path / "plain.gz"), read(tmp_path / "zipped.tsv"))
    assert read(tmp_path / "plain.gz").dense[:, 0].tolist() == list(range(200))


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing garbage"])
def test_damaged_gzip_is_refused(tmp_path, line, damage):
    rng = np.random.default_rng(0)
    whole = gzip.compress("".join(f"{line(0, {'I1': x})}\n" for x in rng.integers(0, 2**60, 2000)).encode())
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:-9],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
        "trailing garbage": whole + b"garbage",
    }[damage]
    (tmp_path / "day.gz").write_bytes(damaged)
    with pytest.raises(UserError, match=r"day\.gz(: damaged gzip stream.*download the file again|:\d+: )"):
        read(tmp_path / "day.gz")


def test_memory_is_that_of_a_block_not_of_the_file(tmp_path, line):
    path = tmp_path / "train.tsv"
    path.write_text("".join(f"{line()}\n" for _ in range(500)))
    assert max(len(chunk) for chunk in read_raw(path, block_bytes=2000)) < 20


def test_file_without_line_feeds_is_refused_in_the_memory_of_a_block(tmp_path):
    (tmp_path / "blob").write_bytes(b"\t" * 5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="blob:1: "):
            read(tmp_path / "blob", block_bytes=10_000)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@given(st.integers(INT64.min, INT64.max) | st.integers(-12, 12))
def test_dense_mapping_is_its_formula(value):
    got = dense_features(np.array([[value]]), np.array([[False]]))
    assert got.dtype == np.float32
    assert got[0, 0] == pytest.approx(math.log(max(value, -2) + 3), rel=1e-6, abs=1e-7)


def test_dense_specials_are_finite_and_ordered():
    values = np.array([INT64.min, -10, -3, -2, -1, 0, 1, 2_147_483_648, INT64.max])
    got = dense_features(values, np.zeros(9, bool))
    assert np.isfinite(got).all()
    assert got[:4].tolist() == [0.0] * 4
    assert (np.diff(got[3:]) > 0).all()
    missing = dense_features(np.array([99]), np.array([True]))
    assert missing == dense_features(np.array([0]), np.array([False]))


@given(token=st.integers(0, 2**32 - 1), rows=st.integers(1, 2**31 - 1))
def test_ids_are_tokens_modulo_table_rows(token, rows):
    ids = sparse_ids(np.array([[token] * 2], np.uint32), np.array([[False, True]]), [rows, rows])
    assert ids.dtype == np.int32
    assert ids.tolist() == [[token % rows, 0]]


def test_equals_pandas(tmp_path):
    rng = np.random.default_rng(3)
    lines = []
    for _ in range(300):
        dense = [None if rng.random() < 0.2 else int(x) for x in rng.integers(-2, 10**9, 13)]
        tokens = [None if rng.random() < 0.2 else int(x) for x in rng.integers(0, 2**32, 26)]
        lines.append(to_text((int(rng.random() < 0.3), dense, tokens)))
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(lines))
    names = ["label", *DENSE_NAMES, *FEATURE_NAMES]
    table = pd.read_csv(io.StringIO("\n".join(lines)), sep="\t", names=names, dtype=str, keep_default_na=False)
    got = read(path, block_bytes=4096)
    np.testing.assert_array_equal(got.labels, table["label"].astype(int))
    np.testing.assert_array_equal(got.dense, table[[*DENSE_NAMES]].replace("", "0").astype("int64"))
    np.testing.assert_array_equal(got.tokens, table[[*FEATURE_NAMES]].map(lambda text: int(text or "0", 16)))
    np.testing.assert_array_equal(got.tokens_missing, table[[*FEATURE_NAMES]] == "")
