"""TorchRec's batch, read back through TorchRec's own accessors."""

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from sparse2d.data.batch import to_torchrec
from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.dataset import RankBatch

CPU = torch.device("cpu")


def rank_batch(size: int, seed: int = 0) -> RankBatch:
    rng = np.random.default_rng(seed)
    return RankBatch(
        dense=rng.normal(size=(size, 13)).astype(np.float32),
        sparse=rng.integers(0, 50, (size, 26), dtype=np.int32),
        labels=rng.integers(0, 2, size).astype(np.float32),
        first_row=0,
        num_rows=size,
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_feature_holds_its_column(size):
    rows = rank_batch(size)
    batch = to_torchrec(rows, CPU)
    ids = batch.sparse_features
    assert ids.keys() == list(FEATURE_NAMES)
    assert ids.stride() == size
    for column, name in enumerate(FEATURE_NAMES):
        assert ids[name].values().tolist() == rows.sparse[:, column].tolist()
        assert ids[name].lengths().tolist() == [1] * size
    assert ids.offsets().tolist() == list(range(26 * size + 1))
    np.testing.assert_array_equal(batch.dense_features.numpy(), rows.dense)
    np.testing.assert_array_equal(batch.labels.numpy(), rows.labels)
    assert batch.labels.dtype == batch.dense_features.dtype == torch.float32


def test_lookup_returns_the_rows_of_the_tables():
    tables = [
        EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name=f"t_{name}", feature_names=[name])
        for name in FEATURE_NAMES
    ]
    collection = EmbeddingBagCollection(tables=tables)
    rows = rank_batch(6)
    pooled = collection(to_torchrec(rows, CPU).sparse_features)
    for column, name in enumerate(FEATURE_NAMES):
        expected = collection.embedding_bags[f"t_{name}"].weight[torch.from_numpy(rows.sparse[:, column]).long()]
        torch.testing.assert_close(pooled[name], expected)


def test_batches_of_one_size_share_lengths_and_no_rows():
    first, second = to_torchrec(rank_batch(4), CPU), to_torchrec(rank_batch(4, seed=1), CPU)
    assert first.sparse_features.lengths() is second.sparse_features.lengths()
    assert first.sparse_features.values().tolist() != second.sparse_features.values().tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_reach_the_gpu():
    rows = rank_batch(5)
    batch = to_torchrec(rows, torch.device("cuda", 0))
    assert batch.sparse_features["C26"].values().tolist() == rows.sparse[:, 25].tolist()
    np.testing.assert_array_equal(batch.dense_features.cpu().numpy(), rows.dense)
    assert batch.labels.device.type == "cuda"
