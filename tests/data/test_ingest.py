"""Days into arrays: any worker, any compression, any interruption gives the same bytes."""

import bz2
import dataclasses
import gzip
import hashlib
import logging
import lzma
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.criteo import BinaryCriteoUtils

from sparse2d.config import DataConfig, DenseMapping, IdMapping, OnBadLine, SplitKind, SyntheticConfig
from sparse2d.data.capacity import estimate_rows
from sparse2d.data.criteo import dense_features
from sparse2d.data.manifest import read_manifest
from sparse2d.data.mappings import _formula, map_dense
from sparse2d.data.prepare import prepare, prepared_folder
from sparse2d.data.raw import find_days, read_text
from sparse2d.data.synthetic import write_raw
from sparse2d.data.verify import verify
from sparse2d.errors import UserError

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def random_lines(line, rows: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 10**6, (rows, 13))
    tokens = rng.integers(0, 2**32, (rows, 26))
    return [
        line(
            int(rng.random() < 0.3),
            {f"I{c + 1}": "" if v % 7 == 0 else v for c, v in enumerate(values[r])}
            | {f"C{c + 1}": "" if t % 9 == 0 else f"{t:08x}" for c, t in enumerate(tokens[r])},
        )
        for r in range(rows)
    ]


@pytest.fixture
def days(tmp_path, line):
    """A folder of three days, 30, 40 and 50 rows, plain or compressed."""

    def make(ends=("", "", ""), name="raw") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for day, end in enumerate(ends):
            text = "".join(f"{text}\n" for text in random_lines(line, 30 + 10 * day, seed=day)).encode()
            (folder / f"day_{day}{end}").write_bytes(COMPRESS[end](text))
        return folder

    return make


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npy")}


def made(options) -> Path:
    return prepare(options, progress=False)


def test_days_come_in_numeric_order(days, config, line):
    raw = days()
    for day in range(3, 11):
        (raw / f"day_{day}").write_text(f"{line(day % 2)}\n")
    manifest = read_manifest(made(config(raw)))
    assert [day.day for day in manifest.days] == list(range(11))
    assert [(day.first_row, day.rows) for day in manifest.days][:4] == [(0, 30), (30, 40), (70, 50), (120, 1)]


def test_compression_changes_no_array(days, config):
    plain = made(config(days()))
    mixed = made(config(days(("", ".gz", ".zst"), "mixed")))
    assert plain != mixed
    assert digests(plain) == digests(mixed)
    assert read_manifest(plain).digest == read_manifest(mixed).digest


def test_one_file_and_its_folder_are_one_dataset(tmp_path, config, line):
    (tmp_path / "kaggle").mkdir()
    text = "".join(f"{text}\n" for text in random_lines(line, 60))
    (tmp_path / "kaggle" / "train.txt").write_text(text)
    by_file, by_folder = made(config(tmp_path / "kaggle" / "train.txt")), made(config(tmp_path / "kaggle"))
    assert digests(by_file) == digests(by_folder)


def test_raw_dir_and_chosen_days(days, config):
    raw = days()
    options = dataclasses.replace(config(raw), path=None, raw_dir=str(raw), days=[2, 0])
    folder = made(options)
    assert [(day.day, day.rows) for day in read_manifest(folder).days] == [(0, 30), (2, 50)]
    assert sorted(path.name for path in folder.glob("*dense*")) == ["day_0_dense.npy", "day_2_dense.npy"]


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (["day_0", "day_2", "day_5"], None, r"no file for day_1, day_3, day_4 beside .*data\.days=\[0, 2, 5\]"),
        (["day_0", "day_1"], [1, 7], r"no file for day_7 beside day_0, day_1; add it"),
        (["day_0", "day_0.gz", "day_1"], None, r"several files for one day: day_0, day_0\.gz"),
        (["day_1", "day_01"], None, r"several files for one day: day_01, day_1"),
        (["readme.md"], None, "no raw days"),
        ([], None, "no raw days"),
    ],
)
def test_missing_and_double_days_are_named(tmp_path, files, wanted, message):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        find_days(tmp_path, wanted)


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "pipe"])
@pytest.mark.parametrize("day", [1, 2])
def test_days_that_are_no_files_are_named(tmp_path, kind, day):
    """Else the last of them would be left out without a word."""
    for other in {0, 1, 2} - {day}:
        (tmp_path / f"day_{other}").touch()
    path = tmp_path / f"day_{day}.gz"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "lost")
    with pytest.raises(UserError, match=rf"not a file \(a folder, or a link to nothing\): day_{day}\.gz; put"):
        find_days(tmp_path, None)
    assert list(find_days(tmp_path, [0])) == [0]


def test_archives_are_refused_by_name(tmp_path, line, config):
    text = tmp_path / "train.txt"
    text.write_text(f"{line(0)}\n{line(1)}\n")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(text)
    for mode in ("", "gz"):
        with tarfile.open(tmp_path / f"a.tar{mode}", f"w:{mode}") as tar:
            tar.add(text)
    (tmp_path / "a.bz2").write_bytes(bz2.compress(text.read_bytes()))
    (tmp_path / "a.xz").write_bytes(lzma.compress(text.read_bytes()))
    kinds = {"a.zip": "zip", "a.tar": "tar", "a.targz": "tar", "a.bz2": "bzip2", "a.xz": "xz"}
    for name, kind in kinds.items():
        for mode in OnBadLine:
            with pytest.raises(UserError, match=rf"{name}: a {kind} archive; unpack it and give the file inside"):
                made(config(tmp_path / name, on_bad_line=mode))


def test_file_of_bad_lines_only_is_refused_with_the_first_reason(tmp_path, line, config):
    (tmp_path / "test.txt").write_text("".join(line(0).split("\t", 1)[1] + "\n" for _ in range(20)))
    with pytest.raises(
        UserError, match=r"test\.txt: 0 rows, only bad lines, the first: 39 fields, .* \(no label\?\); give"
    ):
        made(config(tmp_path / "test.txt", on_bad_line=OnBadLine.reject))


@pytest.mark.parametrize("mode", OnBadLine)
def test_a_line_of_garbage_is_not_taken_for_too_few_rows(tmp_path, line, config, mode):
    (tmp_path / "rows.gz").write_bytes(gzip.compress(b"not a row of Criteo's\n"))
    with pytest.raises(UserError, match=r"rows\.gz:1: 1 fields, expected 40"):
        made(config(tmp_path / "rows.gz", on_bad_line=mode))
    (tmp_path / "row.gz").write_bytes(gzip.compress(line(0).encode()))
    with pytest.raises(UserError, match=r"row\.gz: 1 rows in parts 6:1 leave 0 to train"):
        made(config(tmp_path / "row.gz", on_bad_line=mode))


def test_strangers_are_named_and_left_alone(tmp_path, caplog):
    for name in ("day_3", "day_4.tsv.gz", "notes.txt", "day_x", "test.txt", ".hidden"):
        (tmp_path / name).touch()
    assert [(day, path.name) for day, path in find_days(tmp_path, None).items()] == [(3, "day_3"), (4, "day_4.tsv.gz")]
    assert "day_x, notes.txt, test.txt" in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize("end", list(COMPRESS))
@pytest.mark.parametrize("piece_bytes", [1, 7, 300, 1 << 20])
def test_text_comes_in_whole_lines_and_the_digest_is_the_files(tmp_path, end, piece_bytes):
    text = "".join(f"{'x' * (n % 50)}\n" for n in range(200)).encode() + b"last"
    path = tmp_path / f"day_0{end}"
    path.write_bytes(COMPRESS[end](text[:500]) + COMPRESS[end](text[500:]))
    digest = hashlib.sha256()
    pieces = list(read_text(path, digest, piece_bytes))
    assert b"".join(piece for piece, _ in pieces) == text + b"\n"
    assert all(piece.endswith(b"\n") for piece, _ in pieces)
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert pieces[-1][1] == path.stat().st_size


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing garbage", "second frame cut"])
def test_damaged_zstandard_is_refused(tmp_path, line, config, damage):
    whole = zstandard.ZstdCompressor(write_checksum=True).compress("\n".join(random_lines(line, 300)).encode())
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:-9],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
        "trailing garbage": whole + b"garbage",
        "second frame cut": whole + whole[:10],
    }[damage]
    (tmp_path / "day.zst").write_bytes(damaged)
    with pytest.raises(UserError, match=r"day\.zst(: damaged compressed stream|:\d+: )"):
        made(config(tmp_path / "day.zst"))


def test_line_without_end_is_one_bad_line_in_bounded_memory(tmp_path, line, config):
    (tmp_path / "day_0").write_text(f"{line(0)}\n{'x' * 10_000_000}\n" + f"{line(1)}\n{line(0)}\n" * 10)
    options = config(tmp_path / "day_0", on_bad_line=OnBadLine.reject)
    assert read_manifest(made(options)).source["files"][0]["rejected"] == [[2, "1 fields, expected 40"]]
    assert max(len(piece) for piece, _ in read_text(tmp_path / "day_0", hashlib.sha256(), 1000)) < 2000


def test_workers_change_no_byte(tmp_path, config):
    synthetic = SyntheticConfig(rows=20_000, vocabulary_scale=0.1)
    write_raw(tmp_path / "raw.tsv", tmp_path / "logits.npy", synthetic, config().table_rows)
    folders = [
        made(config(tmp_path / "raw.tsv", workers=workers, out_dir=str(tmp_path / f"out_{workers}")))
        for workers in (1, 2, 5)
    ]
    assert digests(folders[0]) == digests(folders[1]) == digests(folders[2])
    assert len({folder.name for folder in folders}) == 1


def test_synthetic_days_are_the_same_rows_dealt_out(config, tmp_path):
    def rows(days: int, workers: int) -> list[np.ndarray]:
        synthetic = SyntheticConfig(rows=20_001, vocabulary_scale=0.1, days=days)
        folder = made(config(synthetic=synthetic, workers=workers))
        found = read_manifest(folder)
        assert max(day.rows for day in found.days) - min(day.rows for day in found.days) <= 1
        parts = [[np.load(folder / f"day_{d}_{p}.npy") for d in range(days)] for p in ("dense", "sparse", "labels")]
        return [*(np.concatenate(part) for part in parts), found.teacher]

    one, three = rows(1, 1), rows(3, 2)
    for a, b in zip(one[:3], three[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    for split in ("train", "eval"):
        assert one[3][split]["ne"] == pytest.approx(three[3][split]["ne"], rel=1e-9)


def test_finished_days_are_recognised_after_a_bad_line(days, config, caplog, line):
    raw = days()
    good = (raw / "day_1").read_text()
    (raw / "day_1").write_text(f"{good}{line(0)}\textra\n")
    options = config(raw, workers=1)
    with pytest.raises(UserError, match=r"day_1:41: 41 fields, expected 40$"):
        made(options)
    out = Path(options.out_dir)
    assert not list(out.glob("tiny-*"))
    (partial,) = out.glob(".tiny-*")
    assert sorted(path.name for path in partial.glob("*.npy")) == sorted(
        f"day_{d}{end}.npy" for d in (0, 2) for end in (".seen", "_dense", "_labels", "_sparse")
    )
    before = {path.name: path.stat().st_mtime_ns for path in partial.glob("day_0_*")}
    (raw / "day_1").write_text(good)
    with caplog.at_level(logging.INFO):
        folder = made(options)
    assert "day_0 is finished already: 30 rows" in caplog.text
    assert "day_2 is finished already: 50 rows" in caplog.text
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("day_0_*")} == before
    assert digests(folder) == digests(made(config(days(name="clean"), out_dir=str(out / "other"))))
    assert not list(out.glob(".tiny-*"))


@pytest.mark.parametrize("kept", [0, 100, -8])
@pytest.mark.parametrize("name", ["day_0_dense.npy", "day_0.seen.npy", "day_0.json", "vocabulary.npz"])
def test_what_was_finished_and_is_damaged_is_made_again(days, config, name, kept):
    raw = days()
    good = (raw / "day_2").read_text()
    (raw / "day_2").write_text(f"{good}bad\n")
    # The last day trains no vocabulary, so that it is fitted before the bad line is met.
    options = config(raw, ids=IdMapping.contiguous, min_count=1, split=SplitKind.last_day, workers=1)
    with pytest.raises(UserError, match="day_2:51"):
        made(options)
    (damaged,) = Path(options.out_dir).glob(f".tiny-*/{name}")
    damaged.write_bytes(damaged.read_bytes()[:kept])
    (raw / "day_2").write_text(good)
    other = dataclasses.replace(options, out_dir=str(Path(options.out_dir) / "other"))
    assert digests(made(options)) == digests(made(other))


def test_a_finished_day_whose_input_changed_is_converted_again(days, config, line):
    raw = days()
    broken = (raw / "day_2").read_text()
    (raw / "day_2").write_text(broken + "bad\n")
    with pytest.raises(UserError, match="day_2:51"):
        made(config(raw))
    (raw / "day_2").write_text(broken)
    changed = (raw / "day_0").read_text().splitlines()
    (raw / "day_0").write_text("".join(f"{text}\n" for text in [line(1, {"I1": 77}), *changed[1:]]))
    folder = made(config(raw))
    assert np.load(folder / "day_0_dense.npy")[0, 0] == np.float32(np.log(80.0))


def test_other_splits_take_over_finished_days_and_datasets_stay_apart(days, config):
    raw = days()
    parts, last = made(config(raw)), made(config(raw, split=SplitKind.last_day, halve_eval=True))
    assert parts != last
    splits = read_manifest(last).splits
    assert {name: (s.start, s.stop) for name, s in splits.items()} == {
        "train": (0, 70),
        "eval": (70, 95),
        "test": (95, 120),
    }
    labels = np.concatenate([np.load(last / f"day_{d}_labels.npy")[:, 0] for d in range(3)])
    for split in splits.values():
        assert split.positives == labels[split.start : split.stop].sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": SplitKind.rows}, "need each other"),
        ({"split_rows": {"train": [0, 9]}}, "need each other"),
        ({"split": SplitKind.rows, "split_rows": {"train": [0, 9]}}, "expected train, eval and, if wanted, test"),
        ({"split": SplitKind.rows, "split_rows": {"train": [0, 50], "eval": [40, 60]}}, r"train=\[0, 50\).* overlap"),
        ({"split": SplitKind.rows, "split_rows": {"train": [0, 50], "eval": [50, 121]}}, "within the 120 rows"),
        ({"split": SplitKind.rows, "split_rows": {"train": [5, 5], "eval": [50, 51]}}, r"train=\[5, 5\]"),
        ({"days": [0], "split": SplitKind.last_day}, "at least 2 days, found 1"),
        ({"days": [0, 0]}, "expected different days"),
        ({"workers": 0}, r"data\.workers=0"),
        ({"dense_min": 1}, r"data\.dense_min=1"),
        ({"vocabulary": "x"}, r"data\.vocabulary=x needs data\.ids=contiguous"),
    ],
)
def test_bad_options_are_refused(days, config, options, message):
    with pytest.raises(UserError, match=message):
        made(config(days(), **options))


def test_row_ranges_are_taken_as_given(days, config):
    ranges = {"eval": [0, 20], "train": [20, 100], "test": [110, 120]}
    splits = read_manifest(made(config(days(), split=SplitKind.rows, split_rows=ranges))).splits
    assert {name: [s.start, s.stop] for name, s in splits.items()} == ranges


def test_bad_lines_are_left_out_listed_and_capped(days, config, line):
    raw = days()
    lines = (raw / "day_1").read_text().splitlines()
    (raw / "day_1").write_text("\n".join([*lines[:10], "bad", *lines[10:], line(3), f"{line(0)}\r"]))
    folder = made(config(raw, on_bad_line=OnBadLine.reject, max_rejects=3))
    assert digests(folder) == digests(made(config(days(name="clean"))))
    listed = (folder / "rejects.tsv").read_text().splitlines()
    assert [row.split("\t")[:2] for row in listed[1:]] == [["day_1", "11"], ["day_1", "42"], ["day_1", "43"]]
    assert listed[1].endswith("1 fields, expected 40")
    assert "Windows line end" in listed[3]
    with pytest.raises(UserError, match=r"day_1:43: .*; more bad lines than data\.max_rejects=2"):
        made(config(raw, on_bad_line=OnBadLine.reject, max_rejects=2))


def test_the_cap_on_bad_lines_is_over_all_days_and_over_attempts(days, config):
    raw = days()
    for day in (0, 1):
        (raw / f"day_{day}").write_text(f"bad\n{(raw / f'day_{day}').read_text()}bad\n")
    options = config(raw, on_bad_line=OnBadLine.reject, workers=1)
    for _ in range(2):
        # One day is finished when the other one meets the fourth bad line, and counts in the second attempt, too.
        with pytest.raises(UserError, match=r"day_[01]:\d+: .*; more bad lines than data\.max_rejects=3"):
            made(dataclasses.replace(options, max_rejects=3))
    with pytest.raises(UserError, match=r"^2 bad lines in finished days, more than data\.max_rejects=1; raise it$"):
        made(dataclasses.replace(options, max_rejects=1))
    folder = made(dataclasses.replace(options, max_rejects=4))
    listed = [row.split("\t")[:2] for row in (folder / "rejects.tsv").read_text().splitlines()[1:]]
    assert listed == [["day_0", "1"], ["day_0", "32"], ["day_1", "1"], ["day_1", "42"]]
    assert digests(folder) == digests(made(config(days(name="clean"))))


@pytest.mark.parametrize("low", [-2, 0])
def test_arrays_equal_torchrecs_bit_for_bit(tmp_path, line, config, low):
    rng = np.random.default_rng(0)
    rows = random_lines(line, 500)
    values = np.maximum(rng.integers(-2, 2**31 - 100, (500, 13)), low)
    values[::3] = np.maximum(rng.integers(-2, 50, values[::3].shape), low)
    values[0] = low
    lines = [
        "\t".join([text.split("\t")[0], *map(str, row), *text.split("\t")[14:]]).replace(
            f"\t{low + 1}\t", "\t\t", low + 2
        )
        for text, row in zip(rows, values, strict=True)
    ]
    raw = tmp_path / "day_0"
    raw.write_text("".join(f"{text}\n" for text in lines))
    theirs = {part: str(tmp_path / f"theirs_{part}.npy") for part in ("dense", "sparse", "labels")}
    BinaryCriteoUtils.tsv_to_npys(str(raw), theirs["dense"], theirs["sparse"], theirs["labels"])
    options = config(raw, dense=DenseMapping.torchrec, dense_min=low)
    folder = made(options)
    expected = {part: np.load(path) for part, path in theirs.items()}
    expected["sparse"] = (expected["sparse"] % np.array(options.num_embeddings)).astype(np.int32)
    for part, array in expected.items():
        ours = np.load(folder / f"day_0_{part}.npy")
        assert ours.dtype == array.dtype
        assert ours.tobytes() == array.tobytes(), part


def test_torchrec_mapping_is_finite_where_torchrecs_overflows(tmp_path, line, config):
    extremes = [-(2**63), -10, -3, -2, 2**31 - 1, 2**31, 2**63 - 1, ""]
    lines = [line(r % 2, {"I4": value}) for r, value in enumerate(extremes)]
    (tmp_path / "day_0").write_text("".join(f"{text}\n" for text in lines))
    dense = np.load(made(config(tmp_path / "day_0", dense=DenseMapping.torchrec)) / "day_0_dense.npy")[:, 3]
    assert np.isfinite(dense).all()
    assert dense[:4].tolist() == [np.log(np.float32(2))] * 4
    np.testing.assert_allclose(dense[4:], np.log([2**31 + 3, 2**31 + 4, 2**63 + 3, 4]), rtol=1e-6)


PREPARE = """
import pickle, sys
import sparse2d.data.build
from sparse2d.data.prepare import prepare
print("ready", flush=True)
prepare(pickle.load(open(sys.argv[1], "rb")), progress=False)
"""


@pytest.mark.slow
def test_killed_at_random_moments_gives_the_digests_of_an_undisturbed_run(tmp_path, config):
    raw = tmp_path / "raw"
    raw.mkdir()
    for day in range(4):
        synthetic = SyntheticConfig(rows=40_000, seed=day, vocabulary_scale=0.1)
        write_raw(raw / f"day_{day}", tmp_path / "logits.npy", synthetic, config().table_rows)
    undisturbed = made(config(raw, workers=2, out_dir=str(tmp_path / "undisturbed")))
    options = config(raw, workers=2)
    pickled = tmp_path / "options.pickle"
    pickled.write_bytes(pickle.dumps(options))
    rng, kills, resumed = random.Random(0), 0, 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREPARE, str(pickled)]
    out = Path(options.out_dir)
    whole = 1.0
    while kills < 20:
        if list(out.glob("tiny-*")):
            # It got through before the signal: start over.
            shutil.rmtree(out)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, whole))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        else:
            whole = time.monotonic() - started
        process.communicate()
        resumed += bool(list(out.glob(".tiny-*/day_*.json")))
        assert all(verify(folder) == [] for folder in out.glob("tiny-*"))
    folder = made(options)
    assert resumed > 0
    assert digests(folder) == digests(undisturbed)
    assert folder.name == undisturbed.name
    assert not list(out.glob(".tiny-*"))


def damage(folder: Path, name: str, row: int, column: int, value: float) -> None:
    array = np.load(folder / name, mmap_mode="r+")
    array[row, column] = value
    array.flush()


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("day_1_dense.npy", 2, np.nan, "row 5: I3 is not finite"),
        ("day_1_dense.npy", 2, 0.125, None),
        ("day_1_sparse.npy", 3, -1, "row 5: C4 has id -1, expected 0 to 2"),
        ("day_1_sparse.npy", 3, 3, "row 5: C4 has id 3, expected 0 to 2"),
        ("day_1_labels.npy", 0, 2, "row 5: label is not 0 or 1"),
    ],
)
def test_check_says_what_is_wrong(days, config, name, column, value, message):
    folder = made(config(days()))
    assert verify(folder) == []
    damage(folder, name, 5, column, value)
    faults = verify(folder)
    assert f"{name}: sha256 " in faults[0]
    # A changed label changes the positives of its split, too.
    counted = "labels" in name
    assert len(faults) == 1 + (message is not None) + counted
    assert not counted or "positive labels in train, the manifest says" in faults[2]
    assert message is None or f"{name}: {message}" in faults[1]


def test_check_tells_lost_and_shortened_files(days, config):
    folder = made(config(days()))
    (folder / "day_2_labels.npy").unlink()
    os.truncate(folder / "day_0_dense.npy", 100)
    faults = verify(folder)
    assert len(faults) == 2
    assert "day_0_dense.npy: 100 bytes, expected" in faults[0]
    assert "day_2_labels.npy: missing" in faults[1]


def test_check_finds_the_folder_of_the_options_and_makes_none(days, config):
    options = config(days())
    with pytest.raises(UserError, match="nothing was prepared there"):
        prepared_folder(options)
    folder = made(options)
    assert prepared_folder(options) == folder
    with pytest.raises(UserError, match="nothing that was prepared with these options"):
        prepared_folder(config(days(), dense=DenseMapping.torchrec))


def test_needs_are_told_and_checked_before_the_start(days, config, caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        made(config(days()))
    assert "about 120 rows: needs " in caplog.text
    free = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"about 120 rows need .* of disk, .* has 1 KB free"):
        made(config(days(), max_table_rows=77))
    monkeypatch.undo()
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(UserError, match=r"of memory are needed, 1 KB are free; lower data\.workers"):
        made(config(days(), max_table_rows=77))


@pytest.mark.parametrize("end", list(COMPRESS))
def test_rows_are_estimated_from_the_first_lines(tmp_path, line, end):
    lines = random_lines(line, 2000)
    small, large = tmp_path / f"small{end}", tmp_path / f"large{end}"
    small.write_bytes(COMPRESS[end]("\n".join(lines[:50]).encode()))
    large.write_bytes(COMPRESS[end]("".join(f"{text}\n" for text in lines * 40).encode()))
    assert estimate_rows(small) == (50, True)
    rows, exact = estimate_rows(large)
    assert exact == (end == ".zst")
    assert rows == pytest.approx(80_000, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [IdMapping.hash, IdMapping.contiguous])
def test_memory_does_not_grow_with_the_days(ids, tmp_path, config):
    synthetic = SyntheticConfig(rows=40_000, vocabulary_scale=0.1)
    write_raw(tmp_path / "day", tmp_path / "logits.npy", synthetic, config().table_rows)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    show = 'print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])'
    peaks = {}
    # The first process may have to compile.
    for days in (1, 2, 20):
        raw = tmp_path / f"{days}_days"
        raw.mkdir()
        for day in range(days):
            os.link(tmp_path / "day", raw / f"day_{day}")
        pickled = tmp_path / "options.pickle"
        pickled.write_bytes(pickle.dumps(config(raw, workers=2, ids=ids)))
        command = [sys.executable, "-c", f"{PREPARE}\n{show}", str(pickled)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        peaks[days] = int(done.stdout.split()[-1])
    assert peaks[20] < 1.1 * peaks[2]


@pytest.mark.parametrize("mapping", list(DenseMapping))
@given(values=st.lists(st.integers(-5, 5000) | st.integers(-(2**63), 2**63 - 1), min_size=13, max_size=13))
def test_dense_values_from_the_table_are_those_of_the_formula(mapping, values):
    rows, missing = np.array([values]), np.array([[value % 5 == 0 for value in values]])
    data = DataConfig(dense=mapping, dense_min=-2)
    np.testing.assert_array_equal(map_dense(rows, missing, data), _formula(rows, missing, mapping, -2))
    if mapping is DenseMapping.fixed_shift:
        np.testing.assert_array_equal(map_dense(rows, missing, data), dense_features(rows, missing))
