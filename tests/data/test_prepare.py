"""Raw files into prepared folders: the arrays, the manifest, and what is refused."""

import dataclasses
import gzip
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sparse2d.config import DataConfig, SyntheticConfig
from sparse2d.data.dataset import open_dataset
from sparse2d.data.manifest import DENSE, LABELS, MANIFEST, SPARSE, read_manifest
from sparse2d.data.npy import npy_appender
from sparse2d.data.prepare import prepare
from sparse2d.data.synthetic import write_raw
from sparse2d.errors import UserError


def arrays(folder: Path) -> tuple[np.ndarray, ...]:
    return tuple(np.load(folder / name) for name in (DENSE, SPARSE, LABELS))


def left_in(folder: Path) -> list[str]:
    """What stands in a folder, but for the lock that some versions of filelock leave."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", ".digests.json"))


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
PREPARE = """
import pickle, sys
from sparse2d.data.prepare import prepare
print("ready", flush=True)
sys.stdin.readline()
print(prepare(pickle.load(open(sys.argv[1], "rb")), progress=False))
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that prepares once it reads a line, after running ``setup``."""

    def start_process(options: DataConfig, setup: str = "") -> subprocess.Popen[str]:
        pickled = tmp_path / "options.pickle"
        pickled.write_bytes(pickle.dumps(options))
        command = [sys.executable, "-c", f"{setup}\n{PREPARE}", str(pickled)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)

    return start_process


@pytest.fixture
def raw(line, write_lines):
    """70 rows with a known value everywhere the tests look."""
    lines = [line(int(r % 5 == 0), {"I2": r - 2, "I3": "", "C3": f"{r * 100_000_000:x}", "C4": ""}) for r in range(42)]
    return write_lines([*lines, *[line(int(r % 2)) for r in range(28)]])


def test_arrays_have_mlperfs_layout_and_the_mapped_values(config, raw):
    folder = prepare(config(raw), progress=False)
    dense, sparse, labels = arrays(folder)
    assert [(a.dtype.name, a.shape) for a in (dense, sparse, labels)] == [
        ("float32", (70, 13)),
        ("int32", (70, 26)),
        ("int32", (70, 1)),
    ]
    np.testing.assert_allclose(dense[:42, 1], [math.log(max(r - 2, -2) + 3) for r in range(42)], rtol=1e-6)
    assert dense[0, 2] == np.float32(math.log(3))
    assert sparse[:42, 2].tolist() == [r * 100_000_000 % 5000 for r in range(42)]
    assert sparse[:, 3].tolist() == [0] * 42 + [10 % 3] * 28
    assert labels[:, 0].tolist() == [int(r % 5 == 0) for r in range(42)] + [r % 2 for r in range(28)]


def test_manifest_says_what_the_arrays_hold(config, raw):
    options = config(raw, min_table_rows=5, max_table_rows=1000)
    folder = prepare(options, progress=False)
    dense, sparse, labels = arrays(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["name"], manifest["rows"], manifest["schema"]) == ("tiny", 70, 2)
    assert manifest["num_embeddings"] == [min(max(n, 5), 1000) for n in options.table_rows]
    assert (sparse < manifest["num_embeddings"]).all()
    assert manifest["splits"] == {
        "train": {"start": 0, "stop": 60, "positives": 18, "base_rate": 18 / 60},
        "eval": {"start": 60, "stop": 70, "positives": 5, "base_rate": 0.5},
    }
    columns = manifest["columns"]
    np.testing.assert_array_equal(np.float32(columns["dense_min"]), dense.min(axis=0))
    np.testing.assert_array_equal(np.float32(columns["dense_max"]), dense.max(axis=0))
    assert columns["sparse_min"] == sparse.min(axis=0).tolist()
    assert columns["sparse_max"] == sparse.max(axis=0).tolist()
    assert columns["dense_missing"] == [0, 0, 42, *[0] * 10]
    assert columns["sparse_missing"] == [0, 0, 0, 42, *[0] * 22]
    (source,) = manifest["source"]["files"]
    assert source["file"] == "train.tsv"
    assert source["bytes"] == raw.stat().st_size
    assert columns["sparse_distinct"] == [len(np.unique(column)) for column in sparse.T]
    assert columns["sparse_oov"] == [0] * 26
    assert manifest["days"] == [{"day": 0, "first_row": 0, "rows": 70}]
    for name, file in manifest["files"].items():
        digest = subprocess.run(
            ["sha256sum", folder / name], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        assert (file["sha256"], file["bytes"]) == (digest, (folder / name).stat().st_size)
    assert source["sha256"] in subprocess.run(["sha256sum", raw], capture_output=True, text=True).stdout
    assert set(manifest["versions"]) == {"sparse2d", "numpy"}
    assert "modulo" in manifest["mappings"]["sparse"]
    assert manifest["teacher"] is None
    assert set(labels[:, 0]) == set(columns["labels"])


def test_gzip_gives_the_same_dataset(config, raw, tmp_path):
    zipped = tmp_path / "train.tsv.gz"
    zipped.write_bytes(gzip.compress(raw.read_bytes()))
    folders = [prepare(config(path), progress=False) for path in (raw, zipped)]
    assert folders[0] != folders[1]
    for name in (DENSE, SPARSE, LABELS):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert read_manifest(folders[0]).digest == read_manifest(folders[1]).digest


def test_a_row_is_mapped_the_same_in_every_file(config, line, write_lines):
    shared = line(1, {"I2": -1, "I5": "", "C1": "5e100000"})
    mild = write_lines([line(0), shared, line(0)], "mild.tsv")
    extreme = write_lines([shared, line(0, {"I2": -(2**40), "I5": 2**40}), line(0)], "extreme.tsv")
    left, right = (arrays(prepare(config(path, train_parts=2), progress=False)) for path in (mild, extreme))
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a[1], b[0])


def test_digest_stands_for_arrays_and_splits(config, raw, line, write_lines):
    base = read_manifest(prepare(config(raw), progress=False)).digest
    renamed = read_manifest(prepare(config(raw, name="other"), progress=False)).digest
    assert renamed == base
    other_split = read_manifest(prepare(config(raw, eval_parts=2), progress=False)).digest
    rows = raw.read_text().splitlines()
    other_row = write_lines([line(1, {"C26": "b"}), *rows[1:]], "other.tsv")
    assert len({base, other_split, read_manifest(prepare(config(other_row), progress=False)).digest}) == 3


def test_each_option_that_shapes_the_arrays_has_its_own_folder(config, raw):
    variants = [{}, {"eval_parts": 2}, {"max_table_rows": 1000}, {"min_table_rows": 4}, {"name": "other"}]
    folders = {prepare(config(raw, **options), progress=False) for options in variants}
    assert len(folders) == len(variants)
    # How many rows are used shapes nothing.
    assert prepare(config(raw, train_rows=3), progress=False) in folders


def test_second_call_changes_nothing(config, raw):
    folder = prepare(config(raw), progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(config(raw), progress=False) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", [DENSE, SPARSE, LABELS])
@pytest.mark.parametrize("damage", ["8 bytes less", "empty", "gone"])
def test_damaged_output_is_refused_by_name(config, raw, name, damage):
    folder = prepare(config(raw), progress=False)
    path = folder / name
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 8)
    for use in (lambda: prepare(config(raw), progress=False), lambda: open_dataset(folder)):
        with pytest.raises(UserError, match=rf"{name}: .*, expected \d+ bytes; delete .* and prepare it again"):
            use()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 99}', "\udce9"])
def test_damaged_manifest_is_refused(config, raw, text):
    folder = prepare(config(raw), progress=False)
    (folder / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"manifest\.json.*prepare it again"):
        prepare(config(raw), progress=False)


@pytest.mark.parametrize("bad_line", [1, 40, 70])
def test_bad_line_leaves_nothing_behind(config, raw, tmp_path, bad_line):
    lines = raw.read_text().splitlines()
    lines[bad_line - 1] = lines[bad_line - 1].split("\t", 1)[1]
    raw.write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"train\.tsv:{bad_line}: 39 fields, expected 40 \(no label\?\)"):
        prepare(config(raw), progress=False)
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (0, {}, "0 rows"),
        (1, {}, r"1 rows in parts 6:1 leave 0 to train and 1 to evaluate"),
        (5, {"train_parts": 1, "eval_parts": 6}, r"5 rows in parts 1:6 leave 0 to train and 5 to evaluate"),
    ],
)
def test_too_few_rows_are_refused_with_their_number(config, line, write_lines, tmp_path, rows, options, message):
    raw = write_lines([line(r % 2) for r in range(rows)])
    with pytest.raises(UserError, match=message):
        prepare(config(raw, **options), progress=False)
    assert left_in(tmp_path / "out") == []


def test_smallest_file_that_can_be_split(config, line, write_lines):
    raw = write_lines([line(r % 2) for r in range(3)])
    splits = read_manifest(prepare(config(raw), progress=False)).splits
    assert [(split.start, split.stop) for split in splits.values()] == [(0, 2), (2, 3)]


@pytest.mark.parametrize("label", [0, 1])
def test_one_label_only_is_refused(config, line, write_lines, label):
    raw = write_lines([line(label)] * 12 + [line(1 - label)] * 2)
    with pytest.raises(UserError, match=rf"all 12 training rows have label {label}"):
        prepare(config(raw), progress=False)


@pytest.mark.parametrize("label", [0, 1])
def test_one_label_only_in_the_evaluation_rows_is_told(config, line, write_lines, label, caplog):
    raw = write_lines([line(row % 2 if row < 12 else label) for row in range(14)])
    prepare(config(raw), progress=False)
    assert f"{raw}: all 2 eval rows have label {label}: their NE and AUC are undefined" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, "data.path is not set; give"),
        ({"path": ""}, "data.path is empty; give a path, or leave the option out"),
        ({"out_dir": ""}, "data.out_dir is empty"),
        ({"path": None, "raw_dir": ""}, "data.raw_dir is empty"),
        ({"path": "none/such.tsv"}, "data.path=none/such.tsv does not exist; give"),
        ({"path": "/dev/null"}, "data.path=/dev/null is not a file; give"),
        ({"table_rows": [5] * 25}, r"data.table_rows=.*expected 26 integers"),
        ({"table_rows": [5] * 25 + [0]}, r"expected 26 integers"),
        ({"table_rows": [5] * 25 + [2**31]}, r"expected 26 integers, 1 to 2147483647"),
        ({"table_rows": [5] * 25 + [1.5]}, r"expected 26 integers"),
        ({"table_rows": "???"}, r"expected 26 integers"),
        ({"min_table_rows": 9, "max_table_rows": 8}, "data.min_table_rows=9 and data.max_table_rows=8"),
        ({"min_table_rows": 0}, "data.min_table_rows=0"),
        ({"train_parts": 0}, "data.train_parts=0 and data.eval_parts=1"),
        ({"train_parts": 0, "eval_parts": 0, "path": "/tmp"}, "data.train_parts=0 and data.eval_parts=0"),
        ({"name": "a/b"}, "data.name='a/b'"),
        ({"name": "???"}, "data.name="),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(config, raw, tmp_path, options, message):
    with pytest.raises(UserError, match=message) as error:
        prepare(dataclasses.replace(config(raw), **options), progress=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_path_and_synthetic_source_contradict_each_other(config):
    with pytest.raises(UserError, match=r"has no effect with data\.source=synthetic"):
        prepare(dataclasses.replace(config(), path="train.tsv"), progress=False)


def test_out_dir_that_cannot_be_made_is_refused(config, raw):
    with pytest.raises(
        UserError,
        match=r"Not a directory; data\.out_dir=.*train\.tsv/sub \(results_dir/data unless set\) must be writable",
    ):
        prepare(config(raw, out_dir=str(raw / "sub")), progress=False)


def test_full_disk_is_told_and_leaves_nothing(config, raw, tmp_path, start):
    pytest.importorskip("resource")
    process = start(config(raw), "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))")
    _, error = process.communicate("go\n", timeout=60)
    assert process.returncode != 0
    assert "UserError: " in error
    assert "File too large; data.out_dir=" in error
    assert left_in(tmp_path / "out") == []


def test_days_that_were_finished_before_the_disk_was_full_are_kept(config, line, tmp_path, start, caplog):
    pytest.importorskip("resource")
    raw = tmp_path / "days"
    raw.mkdir()
    for day, rows in enumerate((20, 30, 40)):
        (raw / f"day_{day}").write_text("".join(f"{line(row % 2)}\n" for row in range(rows)))
    options = config(raw, workers=1, table_rows=[10] * 26)
    # Between the sizes of the first and of the second day's ids.
    process = start(options, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))")
    _, error = process.communicate("go\n", timeout=60)
    assert process.returncode != 0
    assert "File too large; data.out_dir=" in error
    (partial,) = left_in(tmp_path / "out")
    assert partial.endswith(".partial")
    with caplog.at_level(logging.INFO):
        manifest = read_manifest(prepare(options, progress=False))
    assert [day for day in range(3) if f"day_{day} is finished already" in caplog.text] == [0]
    assert manifest.rows == 90


def test_days_left_by_another_input_are_not_taken_for_finished(config, line, tmp_path, start, monkeypatch):
    """Equal options, so the same unfinished folder: its days are made again, and the disk must have room for them."""
    pytest.importorskip("resource")
    for name, count in (("first", "1"), ("second", "2")):
        (tmp_path / name).mkdir()
        for day, rows in enumerate((20, 400)):
            text = "".join(f"{line(row % 2, {'I1': count})}\n" for row in range(rows))
            (tmp_path / name / f"day_{day}").write_text(text)
    first, second = (config(tmp_path / name, workers=1, table_rows=[10] * 26) for name in ("first", "second"))
    process = start(first, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))")
    process.communicate("go\n", timeout=60)
    assert [name.endswith(".partial") for name in left_in(tmp_path / "out")] == [True]
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match="about 420 rows need"):
        prepare(second, progress=False)
    with pytest.raises(UserError, match="about 400 rows need"):
        prepare(first, progress=False)


def test_prepared_folder_is_used_as_it_is(config, raw, caplog):
    folder = prepare(config(raw), progress=False)
    with caplog.at_level(logging.WARNING):
        assert prepare(config(folder), progress=False) == folder
        assert prepare(config(folder, table_rows="???"), progress=False) == folder
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert prepare(config(folder, table_rows=[9] * 26, eval_parts=3), progress=False) == folder
    assert "data.table_rows" in caplog.text
    assert "data.train_parts and data.eval_parts" in caplog.text


def test_other_folders_are_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"has no manifest\.json and no raw days"):
        prepare(config(tmp_path), progress=False)


def test_synthetic_rows_are_what_the_generated_text_would_give(config, tmp_path):
    options = config()
    folder = prepare(options, progress=False)
    manifest = read_manifest(folder)
    assert manifest.rows == 700
    assert manifest.source["synthetic"]["rows"] == 700
    raw, logits = tmp_path / "rows.tsv", tmp_path / "logits.npy"
    write_raw(raw, logits, options.synthetic, options.table_rows)
    assert read_manifest(prepare(config(raw), progress=False)).digest == manifest.digest
    z, y = np.load(logits), arrays(folder)[2][:, 0]
    for name, rows in {"train": slice(0, 600), "eval": slice(600, 700)}.items():
        p = 1 / (1 + np.exp(-z[rows]))
        loss = -np.mean(np.where(y[rows] == 1, np.log(p), np.log(1 - p)))
        q = y[rows].mean()
        assert manifest.teacher[name]["logloss"] == pytest.approx(loss)
        assert manifest.teacher[name]["ne"] == pytest.approx(loss / -(q * math.log(q) + (1 - q) * math.log(1 - q)))


def test_synthetic_options_have_their_own_folders(config, tmp_path):
    for options in ({}, {"seed": 1}, {"base_rate": 0.5}, {"days": 2}):
        prepare(config(synthetic=SyntheticConfig(rows=100, **options)), progress=False)
    prepare(config(synthetic=SyntheticConfig(rows=100), eval_parts=2), progress=False)
    assert len(left_in(tmp_path / "out")) == 5


def test_processes_that_prepare_at_once_get_one_whole_dataset(config, tmp_path, start):
    processes = [start(config(synthetic=SyntheticConfig(rows=20_000, vocabulary_scale=0.1))) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    (folder,) = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert open_dataset(folder).manifest.rows == 20_000
    assert left_in(tmp_path / "out") == [Path(folder).name]


def test_killed_while_preparing_leaves_no_folder_of_that_name(config, tmp_path, start):
    """SIGKILL can leave a hidden temporary, never a half-written dataset; the next call starts over."""
    options = config(synthetic=SyntheticConfig(rows=60_000, vocabulary_scale=0.1))
    process = start(options)
    process.stdin.write("go\n")
    process.stdin.flush()
    out = tmp_path / "out"
    deadline = time.monotonic() + 60
    while not list(out.glob(".tiny-*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert not list(out.glob("tiny-*"))
    assert open_dataset(prepare(options, progress=False)).manifest.rows == 60_000


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_whoever_waits_long_for_another_process_is_told(config, raw, tmp_path, caplog, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out / ".lock")], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout.readline() == "held\n"
    monkeypatch.setattr("sparse2d.data.prepare.PATIENCE_S", 0.1)
    threading.Timer(0.5, holder.communicate, ["\n"]).start()
    with caplog.at_level(logging.INFO):
        assert open_dataset(prepare(config(raw))).manifest.rows == 70
    assert f"another process, or rank, is at work in data.out_dir={out}: waiting for it to end" in caplog.text


def test_progress_goes_to_stderr_only(config, capfd):
    prepare(config(), progress=True)
    assert capfd.readouterr().out == ""


def test_preparing_needs_no_torch():
    code = "import sys, sparse2d.data.prepare, sparse2d.data.dataset; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


@pytest.mark.parametrize("chunks", [[], [3], [1, 0, 99_999, 7]])
def test_npy_appender_writes_what_numpy_reads(tmp_path, chunks):
    parts = [np.arange(n * 2, dtype=np.int32).reshape(n, 2)[:, ::-1] for n in chunks]
    with npy_appender(tmp_path / "a.npy", np.int32, 2) as append:
        for part in parts:
            append(part)
        with pytest.raises(TypeError, match="expected int32"):
            append(np.zeros((1, 2)))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.concatenate([np.zeros((0, 2), np.int32), *parts]))
