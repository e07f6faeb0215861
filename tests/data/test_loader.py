"""Order, resuming, prefetching and multi-hot ids of the loader; its speed."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse2d.config import SyntheticConfig
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, prefetch, train_batches
from sparse2d.data.multihot import expand
from sparse2d.data.prepare import prepare
from sparse2d.data.shuffle import ShuffledOrder
from sparse2d.errors import UserError

HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@given(
    start=st.integers(0, 50),
    rows=st.integers(1, 500),
    block=st.integers(1, 60),
    window=st.integers(1, 5),
    seed=st.integers(0, 5),
    size=st.integers(1, 50),
)
def test_a_shuffled_order_holds_each_row_once_however_it_is_cut(start, rows, block, window, seed, size):
    order = ShuffledOrder(range(start, start + rows), seed, 0, block, window)
    whole = order.rows(0, rows).tolist()
    assert sorted(whole) == list(range(start, start + rows))
    again = ShuffledOrder(range(start, start + rows), seed, 0, block, window)
    parts = [again.rows(place, min(place + size, rows)).tolist() for place in reversed(range(0, rows, size))]
    assert [row for part in reversed(parts) for row in part] == whole


def test_shuffled_orders_differ_by_seed_and_epoch_and_spread_the_rows():
    orders = [ShuffledOrder(range(100_000), seed, epoch).rows(0, 100_000) for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (orders[a] == orders[b]).mean() < 0.01
    # Rows of a batch come from all over a window of 64 blocks.
    assert np.ptp(orders[0][:1000]) > 90_000
    assert len(np.unique(orders[0][:1000] // 4096)) > 15


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shuffled_batches_are_the_same_on_any_ranks_and_resume(tagged, rows_of, world_size):
    dataset = tagged(45, 5)

    def steps(**options):
        by_rank = [list(train_batches(dataset, 8, r, world_size, shuffle_seed=3, **options)) for r in range(world_size)]
        return [[row for batches in by_rank for row in rows_of(batches[s])] for s in range(len(by_rank[0]))]

    straight = steps()
    assert straight == [rows_of(batch) for batch in train_batches(dataset, 8, 0, 1, shuffle_seed=3)]
    assert straight == steps(max_steps=2) + steps(start_step=2)
    seen = sorted(row for step in straight for row in step)
    assert len(set(seen)) == len(seen) == 40
    assert seen != sorted(range(40))
    assert steps(epoch=1) != straight


def test_shuffled_rows_carry_their_values_and_name_their_own_place(tagged):
    dataset = tagged(40, 5)
    batch = next(train_batches(dataset, 40, 0, 1, shuffle_seed=0))
    rows = batch.sparse[:, 25]
    np.testing.assert_array_equal(batch.dense, np.load(dataset.path / "day_0_dense.npy")[rows])
    np.testing.assert_array_equal(batch.labels, rows % 2)
    array = np.load(dataset.path / "day_0_sparse.npy", mmap_mode="r+")
    array[17, 3] = 99
    array.flush()
    with pytest.raises(UserError, match=r"day_0_sparse\.npy: row 17: C4 has id 99"):
        next(train_batches(open_dataset(dataset.path), 40, 0, 1, shuffle_seed=0))


def test_rows_and_errors_name_the_days_own_file(config):
    synthetic = SyntheticConfig(rows=90, days=3, vocabulary_scale=0.1)
    folder = prepare(config(synthetic=synthetic, train_parts=2), progress=False)
    array = np.load(folder / "day_1_sparse.npy", mmap_mode="r+")
    array[4, 3] = -7
    array.flush()
    with pytest.raises(UserError, match=r"day_1_sparse\.npy: row 4: C4 has id -7, expected 0 to 2"):
        list(train_batches(open_dataset(folder), 12, 0, 1))
    with pytest.raises(UserError, match=r"day_1_sparse\.npy: row 4: C4 has id -7"):
        list(train_batches(open_dataset(folder), 12, 0, 1, shuffle_seed=1))


def test_prefetching_changes_nothing(tagged, rows_of):
    dataset = tagged(40, 5)
    plain = [rows_of(batch) for batch in train_batches(dataset, 8, 0, 1)]
    for together in (1, 2, 5, 8):
        batches = prefetch(train_batches(dataset, 8, 0, 1), together=together)
        assert [rows_of(batch) for batch in batches] == plain
    assert list(prefetch(iter([]))) == []


@pytest.mark.parametrize("together", [1, 2, 5])
def test_an_error_comes_where_its_batch_would_have(together):
    def items():
        yield 1
        yield 2
        raise UserError("third")

    ahead = prefetch(items(), together=together)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(UserError, match="third"):
        next(ahead)


def test_the_thread_works_ahead_and_ends_with_its_iterator():
    made = []

    def items():
        for n in range(10**9):
            made.append(n)
            yield n

    ahead = prefetch(items(), depth=3, together=2)
    assert next(ahead) == 0
    deadline = time.monotonic() + 20
    while len(made) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(made) == 8
    ahead.close()
    while any(thread.name.startswith("prefetch") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_multi_hot_ids_start_with_the_rows_own_and_are_a_function_of_it():
    rng = np.random.default_rng(0)
    limits = rng.integers(2, 10**6, 26)
    limits[0] = 1
    ids = rng.integers(0, limits, (3000, 26)).astype(np.int32)
    ids[1500:] = ids[:1500]
    got = expand(ids, HOTNESS, limits.tolist())
    assert (got.dtype, got.shape) == (np.int32, (3000, sum(HOTNESS)))
    firsts = np.cumsum([0, *HOTNESS[:-1]])
    np.testing.assert_array_equal(got[:, firsts], ids)
    np.testing.assert_array_equal(got[1500:], got[:1500])
    assert (got >= 0).all()
    assert (got < np.repeat(limits, HOTNESS)).all()
    # Companions of a feature with 100 ids are spread over its table, and differ by place.
    bag = got[:1500, firsts[20] : firsts[20] + 100] / limits[20]
    assert abs(bag[:, 1:].mean() - 0.5) < 0.01
    assert abs(np.corrcoef(bag[:, 1], bag[:, 2])[0, 1]) < 0.1
    assert abs(np.corrcoef(bag[:, 0], bag[:, 1])[0, 1]) < 0.1


def test_multi_hot_batches_reach_torchrec_feature_by_feature(tagged):
    path = tagged(16, 4).path
    dataset = open_dataset(path, multi_hot=HOTNESS)
    batch = next(train_batches(dataset, 8, 0, 1))
    features = to_torchrec(batch, torch.device("cpu")).sparse_features
    first = 0
    for f, count in enumerate(HOTNESS):
        one = features[f"C{f + 1}"]
        np.testing.assert_array_equal(one.values().numpy().reshape(8, count), batch.sparse[:, first : first + count])
        assert one.lengths().tolist() == [count] * 8
        first += count
    with pytest.raises(UserError, match=r"data\.multi_hot=\[1\], expected 26 integers"):
        open_dataset(path, multi_hot=[1])


def test_mlperfs_multi_hot_sizes_are_a_choice(composed):
    data = composed("train", "data=criteo_1tb_multi_hot").data
    assert data.multi_hot == HOTNESS
    assert data.name == "criteo_1tb"
