"""Opening, and which rank sees which rows: row r carries the token r."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse2d.data.dataset import (
    dropped_rows,
    eval_batches,
    num_eval_steps,
    num_train_steps,
    open_dataset,
    train_batches,
)
from sparse2d.data.manifest import LABELS, MANIFEST, SPARSE
from sparse2d.data.prepare import prepare
from sparse2d.errors import UserError

shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def edit(folder, name, row, column, value):
    array = np.load(folder / name, mmap_mode="r+")
    array[row, column] = value
    array.flush()


def test_open_shows_the_manifest_and_maps_the_arrays(tagged, config):
    dataset = tagged(10, 4)
    assert all(isinstance(array, np.memmap) for array in (dataset.days[0].dense, dataset.days[0].sparse))
    assert (dataset.train, dataset.eval) == (range(0, 10), range(10, 14))
    assert (dataset.name, dataset.base_rate) == ("tiny", 0.5)
    assert dataset.num_embeddings == tuple(config().num_embeddings)
    assert len(dataset.digest) == 64


def test_fewer_rows_are_the_first_ones(tagged):
    whole = tagged(10, 4)
    dataset = open_dataset(whole.path, train_rows=3, eval_rows=1)
    assert (dataset.train, dataset.eval) == (range(0, 3), range(10, 11))
    assert dataset.base_rate == 1 / 3


@pytest.mark.parametrize("option", ["train_rows", "eval_rows"])
@pytest.mark.parametrize("rows", [0, -1, 11])
def test_rows_that_are_not_there_are_refused(tagged, option, rows):
    with pytest.raises(UserError, match=rf"data\.{option}={rows}, expected 1 to 10"):
        open_dataset(tagged(10, 10).path, **{option: rows})


def test_rows_of_one_label_are_refused(tagged):
    with pytest.raises(UserError, match="first 1 training rows all have label 0"):
        open_dataset(tagged(10, 4).path, train_rows=1)


def test_recorded_id_out_of_range_is_refused_before_training(tagged):
    folder = tagged(10, 4).path
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["num_embeddings"][25] = 13
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="C26 has id 13, expected 0 to 12"):
        open_dataset(folder)


def test_array_of_another_shape_is_refused(tagged):
    folder = tagged(10, 4).path
    array = np.load(folder / SPARSE)
    np.save(folder / SPARSE, array.reshape(26, 14))
    with pytest.raises(UserError, match=r"day_0_sparse\.npy: int32\[26, 14\], expected int32\[14, 26\]"):
        open_dataset(folder)


def test_file_of_the_right_size_that_is_no_array_is_refused(tagged):
    path = tagged(10, 4).path / LABELS
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(UserError, match=r"day_0_labels\.npy: not a \.npy file"):
        open_dataset(path.parent)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none has no manifest\.json"):
        open_dataset(tmp_path / "none")


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_together_see_each_global_batch_in_time_order(tagged, rows_of, world_size):
    dataset = tagged(29, 5)
    assert (num_train_steps(dataset, 8), dropped_rows(dataset, 8)) == (3, 5)
    by_rank = [list(train_batches(dataset, 8, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in by_rank} == {3}
    for step in range(3):
        assert {batches[step].num_rows for batches in by_rank} == {8 // world_size}
        assert [row for batches in by_rank for row in rows_of(batches[step])] == list(range(8 * step, 8 * step + 8))


def test_batches_carry_the_rows_dense_values_labels_and_places(tagged):
    dataset = tagged(8, 4)
    batch = next(train_batches(dataset, 8, 1, 2))
    np.testing.assert_array_equal(batch.dense, np.load(dataset.path / "day_0_dense.npy")[4:8])
    np.testing.assert_array_equal(batch.sparse, np.load(dataset.path / "day_0_sparse.npy")[4:8])
    assert batch.labels.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert (batch.first_row, batch.num_rows) == (4, 4)
    assert [a.dtype.name for a in (batch.dense, batch.sparse, batch.labels)] == ["float32", "int32", "float32"]
    assert all(a.flags.writeable and a.flags.c_contiguous for a in (batch.dense, batch.sparse, batch.labels))


def test_steps_resume_where_they_stopped(tagged, rows_of):
    dataset = tagged(40, 4)
    straight = [rows_of(batch) for batch in train_batches(dataset, 4, 0, 2)]
    first = [rows_of(batch) for batch in train_batches(dataset, 4, 0, 2, max_steps=4)]
    rest = [rows_of(batch) for batch in train_batches(dataset, 4, 0, 2, start_step=4, max_steps=10)]
    assert len(first) == 4
    assert first + rest == straight
    assert not list(train_batches(dataset, 4, 0, 2, start_step=10))
    assert len(list(train_batches(dataset, 4, 0, 2, max_steps=99))) == 10


def test_global_batches_that_cannot_be_made_are_refused_at_once(tagged):
    dataset = tagged(10, 4)
    with pytest.raises(UserError, match="global_batch_size=8 is not a positive multiple of 3 ranks"):
        train_batches(dataset, 8, 0, 3)
    with pytest.raises(UserError, match="global_batch_size=0"):
        train_batches(dataset, 0, 0, 3)
    with pytest.raises(UserError, match="10 training rows fill no batch of global_batch_size=16"):
        train_batches(dataset, 16, 0, 1)
    with pytest.raises(UserError, match="eval_batch_size=0"):
        eval_batches(dataset, 0, 0, 1)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4])
def test_each_evaluation_row_is_seen_once(tagged, rows_of, rows, world_size, size):
    dataset = tagged(6, rows)
    by_rank = [list(eval_batches(dataset, size, rank, world_size)) for rank in range(world_size)]
    steps = num_eval_steps(dataset, size, world_size)
    assert {len(batches) for batches in by_rank} == {steps}
    assert (steps - 1) * size * world_size < rows <= steps * size * world_size
    in_order = [row for step in range(steps) for batches in by_rank for row in rows_of(batches[step])]
    assert in_order == list(range(6, 6 + rows))
    for batch in (batch for batches in by_rank for batch in batches):
        assert len(batch.labels) == len(batch.dense) == len(batch.sparse) == size
        assert batch.sparse[batch.num_rows :, 25].tolist() == [6] * (size - batch.num_rows)


@shared_fixtures
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 19))
def test_evaluation_covers_any_rows_on_any_ranks(evaluation, rows_of, size, world_size, rows):
    dataset = open_dataset(evaluation, eval_rows=rows)
    seen = [
        row for r in range(world_size) for batch in eval_batches(dataset, size, r, world_size) for row in rows_of(batch)
    ]
    assert sorted(seen) == list(range(6, 6 + rows))


@pytest.fixture
def evaluation(tagged):
    return tagged(6, 19).path


def test_training_then_evaluating_again_gives_the_same_rows(tagged, rows_of):
    dataset = tagged(12, 5)
    training = train_batches(dataset, 2, 0, 1)
    seen = []
    for _ in range(2):
        seen += [row for _ in range(3) for row in rows_of(next(training))]
        assert [row for batch in eval_batches(dataset, 2, 0, 1) for row in rows_of(batch)] == [12, 13, 14, 15, 16]
    assert seen == list(range(12))


@pytest.mark.parametrize("bad", [-1, 3, 4, -(2**31), 2**31 - 1])
def test_id_out_of_range_is_refused_with_feature_id_limit_and_row(tagged, bad):
    dataset = tagged(8, 4)
    edit(dataset.path, SPARSE, 6, 3, bad)
    batches = train_batches(open_dataset(dataset.path), 4, 1, 2)
    assert next(batches).first_row == 2
    with pytest.raises(UserError, match=rf"row 6: C4 has id {bad}, expected 0 to 2$"):
        next(batches)


def test_largest_id_is_accepted(tagged):
    dataset = tagged(8, 4)
    edit(dataset.path, SPARSE, 6, 3, 2)
    assert sum(len(batch.labels) for batch in train_batches(dataset, 4, 0, 1)) == 8


@pytest.mark.parametrize("bad", [-1, 2])
def test_label_out_of_range_is_refused_with_its_row(tagged, bad):
    dataset = tagged(8, 4)
    edit(dataset.path, LABELS, 9, 0, bad)
    with pytest.raises(UserError, match=rf"day_0_labels\.npy: row 9: label {bad}, expected 0 or 1"):
        list(eval_batches(dataset, 4, 0, 1))


def test_a_moved_dataset_opens(tagged, tmp_path):
    dataset = tagged(8, 4)
    moved = shutil.move(dataset.path, tmp_path / "elsewhere")
    assert open_dataset(moved).digest == dataset.digest


def test_rows_of_synthetic_data_differ_by_rank_and_not_by_ranks(config):
    dataset = open_dataset(prepare(config(), progress=False))
    alone = next(train_batches(dataset, 64, 0, 1))
    halves = [next(train_batches(dataset, 64, rank, 2)) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate([half.sparse for half in halves]), alone.sparse)
    assert (halves[0].sparse != halves[1].sparse).any()
