"""Arrays of other programs: TorchRec's and MLPerf's folders train as they are."""

import dataclasses
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from torchrec.datasets.criteo import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe

from sparse2d.config import IdMapping, SplitKind
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.data.digests import sha256_of
from sparse2d.data.manifest import OutputFile, read_manifest
from sparse2d.data.prepare import prepare
from sparse2d.data.verify import verify
from sparse2d.errors import UserError

HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@pytest.fixture
def mlperf(tmp_path, config):
    """A folder of MLPerf's arrays: days of 20 and 30 rows, ids within the tables."""

    def make(multi_hot: bool = False, sparse: bool = True):
        folder = tmp_path / "mlperf"
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        limits = np.array(config().num_embeddings)
        for day, rows in enumerate((20, 30)):
            np.save(folder / f"day_{day}_dense.npy", rng.random((rows, 13), np.float32))
            np.save(folder / f"day_{day}_labels.npy", (np.arange(rows) % 3 == 0).astype(np.int32)[:, None])
            ids = rng.integers(0, limits, (rows, 26)).astype(np.int32)
            if sparse:
                np.save(folder / f"day_{day}_sparse.npy", ids)
            if multi_hot:
                bags = {}
                for f, count in enumerate(HOTNESS):
                    bags[str(f)] = rng.integers(0, limits[f], (rows, count)).astype(np.int32)
                    bags[str(f)][:, 0] = ids[:, f]
                np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **bags)
        return folder

    return make


def all_rows(folder, **options):
    dataset = open_dataset(folder, **options)
    batches = list(train_batches(dataset, len(dataset.train), 0, 1))
    return batches[0]


def test_mlperf_folder_trains_as_it_is(mlperf, config):
    arrays = mlperf()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in arrays.iterdir())
    folder = prepare(config(arrays, split=SplitKind.last_day, halve_eval=True), progress=False)
    batch = all_rows(folder)
    np.testing.assert_array_equal(batch.dense, np.load(arrays / "day_0_dense.npy"))
    np.testing.assert_array_equal(batch.sparse, np.load(arrays / "day_0_sparse.npy"))
    dataset = open_dataset(folder)
    assert dataset.eval == range(20, 35)
    assert verify(folder) == []
    assert sorted((path.name, path.stat().st_mtime_ns) for path in arrays.iterdir()) == before
    assert prepare(config(arrays, split=SplitKind.last_day, halve_eval=True), progress=False) == folder


def test_batches_span_days(mlperf, config):
    arrays = mlperf()
    folder = prepare(config(arrays, train_parts=4), progress=False)
    got = np.concatenate([batch.sparse for batch in train_batches(open_dataset(folder), 8, 0, 1)])
    whole = np.concatenate([np.load(arrays / f"day_{day}_sparse.npy") for day in range(2)])
    np.testing.assert_array_equal(got, whole[:40])


def test_torchrecs_whole_tokens_are_taken_modulo_as_its_loader_does(tmp_path, config, line):
    rng = np.random.default_rng(0)
    raw, theirs = tmp_path / "day_0", tmp_path / "theirs"
    theirs.mkdir()
    rows = [line(r % 2, {f"C{c + 1}": f"{t:x}" for c, t in enumerate(rng.integers(0, 2**32, 26))}) for r in range(64)]
    raw.write_text("".join(f"{text}\n" for text in rows))
    files = [str(theirs / f"day_0_{part}.npy") for part in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(str(raw), *files)
    options = config(theirs, train_parts=63, eval_parts=1)
    batches = list(train_batches(open_dataset(prepare(options, progress=False)), 9, 0, 1))
    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train", [files[0]], [files[1]], [files[2]], batch_size=9, rank=0, world_size=1, hashes=options.num_embeddings
    )
    for ours, expected in zip(batches, pipe, strict=False):
        np.testing.assert_array_equal(ours.sparse.T.reshape(-1), expected.sparse_features.values().numpy())
        np.testing.assert_array_equal(ours.dense, expected.dense_features.numpy())
        np.testing.assert_array_equal(ours.labels, expected.labels.numpy())


@pytest.mark.parametrize("sparse", [True, False])
def test_stored_multi_hot_ids_are_read_in_place(mlperf, config, sparse):
    arrays = mlperf(multi_hot=True, sparse=sparse)
    folder = prepare(config(arrays, train_parts=4), progress=False)
    bags = [np.load(arrays / f"day_{day}_sparse_multi_hot.npz") for day in range(2)]
    batch = all_rows(folder, multi_hot=HOTNESS)
    expected = np.concatenate([np.concatenate([bag[str(f)] for f in range(26)], axis=1) for bag in bags])[:40]
    np.testing.assert_array_equal(batch.sparse, expected)
    single = all_rows(folder)
    np.testing.assert_array_equal(single.sparse[:, 20], np.concatenate([bag["20"][:, 0] for bag in bags])[:40])
    with pytest.raises(UserError, match=r"its multi-hot arrays have \[3, 2, .*give the same, or null"):
        open_dataset(folder, multi_hot=[2] * 26)


def test_compressed_multi_hot_file_is_refused(mlperf, config):
    arrays = mlperf(multi_hot=True, sparse=False)
    with np.load(arrays / "day_1_sparse_multi_hot.npz") as bags:
        content = dict(bags)
    np.savez_compressed(arrays / "day_1_sparse_multi_hot.npz", **content)
    with pytest.raises(UserError, match=r"day_1_sparse_multi_hot\.npz: .*compressed.*numpy\.savez"):
        prepare(config(arrays), progress=False)


def with_bags(change):
    """Write day 1's multi-hot file anew after ``change`` of its arrays, by name."""

    def rewrite(folder):
        file = folder / "day_1_sparse_multi_hot.npz"
        with np.load(file) as bags:
            content = dict(bags)
        change(content)
        np.savez(file, **content)

    return rewrite


def set_id(name, row, place, value):
    def change(bags):
        bags[name][row, place] = value

    return change


BAD_BAGS = [
    (with_bags(lambda bags: bags.pop("25")), r"25 arrays, expected 26"),
    (with_bags(lambda bags: bags.update({"2": bags["2"][:-1]})), r'array "2" is int32\[29, 1\], expected .*\[30, ids'),
    (with_bags(lambda bags: bags.update({"2": bags["2"][:, 0]})), r'array "2" is int32\[30\], expected'),
    (with_bags(lambda bags: bags.update({"2": bags["2"][:, :0]})), r'array "2" is int32\[30, 0\], expected'),
    (with_bags(lambda bags: bags.update({"2": bags["2"] * 1.0})), r'array "2" is float64\[30, 1\], expected integers'),
    (with_bags(lambda bags: bags.update({"x": bags.pop("2")})), r"not an \.npz file of arrays 0, 1"),
    (lambda f: (f / "day_1_sparse_multi_hot.npz").write_bytes(b"PK"), r"not an \.npz file of arrays 0, 1"),
]
BAD_IDS = [
    (with_bags(set_id("20", 7, 99, 61)), "row 7: C21 has id 61, expected 0 to 60"),
    (with_bags(set_id("0", 29, 2, -1)), "row 29: C1 has id -1, expected 0 to 9"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BAGS)
@pytest.mark.parametrize("sparse", [True, False])
def test_other_multi_hot_files_are_refused(mlperf, config, sparse, change, message):
    arrays = mlperf(multi_hot=True, sparse=sparse)
    change(arrays)
    with pytest.raises(UserError, match=rf"day_1_sparse_multi_hot\.npz: .*{message}"):
        open_dataset(prepare(config(arrays, train_parts=4), progress=False))


@pytest.mark.parametrize(("change", "message"), [*BAD_BAGS, *BAD_IDS])
def test_check_says_what_is_wrong_with_multi_hot_files(mlperf, config, change, message):
    arrays = mlperf(multi_hot=True)
    folder = prepare(config(arrays, train_parts=4), progress=False)
    assert verify(folder) == []
    change(arrays)
    size = verify(folder)[0]
    assert re.search(r"day_1_sparse_multi_hot\.npz: (\d+ bytes|sha256 \w+\.\.\.), expected", size)
    # As if another program had written it so before it was described.
    file = arrays / "day_1_sparse_multi_hot.npz"
    manifest = read_manifest(folder)
    manifest.files[file.name] = OutputFile(file.stat().st_size, sha256_of(file), "int32", [])
    manifest.write(folder)
    assert any(re.search(rf"day_1_sparse_multi_hot\.npz: .*{message}", fault) for fault in verify(folder))


def test_check_tells_a_lost_multi_hot_file_and_wrong_splits(mlperf, config):
    arrays = mlperf(multi_hot=True)
    folder = prepare(config(arrays, train_parts=4), progress=False)
    manifest = read_manifest(folder)
    train = manifest.splits["train"]
    manifest.splits["train"] = dataclasses.replace(train, positives=train.positives + 1, base_rate=0.9)
    manifest.write(folder)
    (fault,) = verify(folder)
    assert fault.endswith(
        f"{train.positives} positive labels in train, the manifest says {train.positives + 1}, base rate 0.9"
    )
    (arrays / "day_0_sparse_multi_hot.npz").unlink()
    (fault,) = verify(folder)
    assert "day_0_sparse_multi_hot.npz: missing" in fault


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("multi_hot", [None, HOTNESS])
def test_whole_tokens_are_taken_modulo_wherever_they_are_read(mlperf, config, sparse, multi_hot):
    arrays = mlperf(multi_hot=True, sparse=sparse)
    limits = np.array(config().num_embeddings)
    if sparse:
        ids = np.load(arrays / "day_0_sparse.npy")
        np.save(arrays / "day_0_sparse.npy", ids.astype(np.int64) + 2**40 * limits)
    with np.load(arrays / "day_0_sparse_multi_hot.npz") as bags:
        content = {name: bag.astype(np.int64) - 3 * limits[int(name)] for name, bag in bags.items()}
        expected = [bag for _, bag in bags.items()]
    np.savez(arrays / "day_0_sparse_multi_hot.npz", **content)
    folder = prepare(config(arrays, split=SplitKind.last_day), progress=False)
    assert verify(folder) == []
    assert read_manifest(folder).modulo
    found = all_rows(folder, multi_hot=multi_hot).sparse
    bags = expected if multi_hot else [bag[:, :1] for bag in expected]
    np.testing.assert_array_equal(found, np.concatenate(bags, axis=1))


@pytest.mark.parametrize(("feature", "past"), [(0, -1), (20, 0), (25, 5)])
def test_an_id_beyond_its_table_trains_no_row_unless_asked_for(mlperf, config, feature, past, caplog):
    arrays = mlperf()
    limit = config().num_embeddings[feature]
    ids = np.load(arrays / "day_1_sparse.npy")
    ids[29, feature] = bad = past if past < 0 else limit + past
    np.save(arrays / "day_1_sparse.npy", ids)
    with pytest.raises(
        UserError, match=rf"C{feature + 1} has ids from .*{bad}.*expected 0 to {limit - 1}: raise data\."
    ):
        prepare(config(arrays, ids=IdMapping.as_found), progress=False)
    assert not list(Path(config().out_dir).glob("*/manifest.json"))
    with caplog.at_level(logging.INFO):
        folder = prepare(config(arrays, ids=IdMapping.hash, train_parts=4), progress=False)
        assert prepare(config(arrays, ids=IdMapping.hash, train_parts=4), progress=False) == folder
    assert caplog.text.count("modulo the tables' rows") == 2
    assert (all_rows(folder).sparse >= 0).all()


def test_ids_as_found_are_no_way_to_read_raw_rows(config, tmp_path):
    (tmp_path / "raw.tsv").write_text("0\n")
    with pytest.raises(UserError, match=r"raw\.tsv holds no day_D_dense\.npy and no manifest\.json; raw tokens need"):
        prepare(config(tmp_path / "raw.tsv", ids=IdMapping.as_found), progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "day_1_sparse.npy").unlink(), r"no day_1_sparse\.npy beside day_1_dense\.npy"),
        (lambda f: (f / "day_1_labels.npy").unlink(), r"no day_1_labels\.npy"),
        (lambda f: np.save(f / "day_1_dense.npy", np.zeros((30, 12), np.float32)), r"float32\[30, 12\], expected"),
        (lambda f: np.save(f / "day_1_dense.npy", np.zeros((29, 13), np.float32)), "the same number of rows"),
        (lambda f: np.save(f / "day_1_dense.npy", np.full((30, 13), np.nan, np.float32)), "row 0 has a value that is"),
        (lambda f: (f / "day_1_dense.npy").write_bytes(b"x"), r"not a \.npy file"),
    ],
)
def test_broken_folders_are_refused(mlperf, config, change, message):
    arrays = mlperf()
    change(arrays)
    with pytest.raises(UserError, match=message):
        prepare(config(arrays), progress=False)
