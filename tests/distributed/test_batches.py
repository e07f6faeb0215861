"""Batches that a loader never makes, and a rank that is killed: no hang, and the cause is named."""

import pytest
import torch
from configs import tiny_train
from fault_ranks import KILL_PHASES, killed_in, odd_batches

from sparse2d.config import ParallelismKind, ShardingKind, TableOptimizer
from sparse2d.launch import RanksFailedError, run_ranks

UNEVEN, EMPTY = (15, 7, 1, 0), (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "num_groups", "sharding", "sizes"),
    [
        (ParallelismKind.full_mp, 1, ShardingKind.table_wise, UNEVEN),
        (ParallelismKind.full_mp, 1, ShardingKind.row_wise, EMPTY),
        (ParallelismKind.sparse_2d, 2, ShardingKind.column_wise, UNEVEN),
        (ParallelismKind.data_parallel, 1, ShardingKind.table_wise, UNEVEN),
    ],
)
def test_uneven_empty_and_idless_batches(kind, num_groups, sharding, sizes, tmp_path, tiny_dataset):
    config = tiny_train(
        tmp_path,
        kind,
        num_ranks=4,
        num_groups=num_groups,
        sharding=[sharding],
        optimizer=TableOptimizer.rowwise_adagrad,
    )
    pooled, tables, before = run_ranks(odd_batches, config, sizes, tiny_dataset, num_ranks=4)
    # A feature without ids is pooled to zeros.
    assert pooled.numel() > 0
    assert not pooled.any()
    assert all(weight.isfinite().all() for weight in tables.values())
    assert any(not torch.equal(tables[name], before[name]) for name in tables)


def test_uneven_batches_of_row_wise_tables_end_with_an_error_and_do_not_hang(tmp_path, tiny_dataset):
    """Upstream's reduce-scatter needs batches of one size, which the loader makes."""
    config = tiny_train(tmp_path, num_ranks=4, sharding=[ShardingKind.row_wise])
    with pytest.raises(RanksFailedError, match=r"invalid tensor size|Connection closed by peer"):
        run_ranks(odd_batches, config, UNEVEN, tiny_dataset, num_ranks=4)


@pytest.mark.parametrize("phase", KILL_PHASES)
def test_a_rank_killed_in_any_phase_is_named(phase, tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2, save_every=1)
    with pytest.raises(RanksFailedError, match=r"^rank 2: killed by SIGKILL$"):
        run_ranks(killed_in, config, phase, tmp_path / "c", tiny_dataset, num_ranks=4)
