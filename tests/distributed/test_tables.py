"""Fused kernels and averaging on real ranks against the reference formulas on whole tables."""

import itertools

import numpy as np
import pytest
import torch
from one_process import expected
from ranks import TableRun, pool_with_idle_ranks, step_tables, upstream_layouts

from sparse2d.config import (
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    Replicas,
    ShardingKind,
    SyncConfig,
    SyncMoments,
    TableOptimizer,
)
from sparse2d.launch import run_ranks
from sparse2d.mesh import Mesh

SHAPES = {"t_a": (12, 8), "t_b": (30, 8)}
INSIDE_HOSTS = (ShardingKind.table_row_wise, ShardingKind.table_column_wise, ShardingKind.grid_shard)
STEPS, BATCH, IDS_PER_BAG = 5, 6, 3


def make_run(
    num_ranks: int,
    num_groups: int,
    sharding: ShardingKind,
    optimizer: OptimizerConfig,
    interval: int = 1,
    moments: SyncMoments = SyncMoments.with_weights,
    ranks_per_host: int | None = None,
) -> TableRun:
    """Ids with many repeats (inside a bag, a batch, and across ranks) and rows that never occur."""
    rng = np.random.default_rng(0)
    limits = np.array([rows // 2 for rows, _ in SHAPES.values()])[:, None]
    ids = rng.integers(0, limits, (STEPS, num_ranks, len(SHAPES), BATCH * IDS_PER_BAG))
    factors = rng.normal(size=(STEPS, num_ranks, BATCH, sum(dim for _, dim in SHAPES.values()))).astype(np.float32)
    kind = ParallelismKind.full_mp if num_groups == 1 else ParallelismKind.sparse_2d
    layout = ParallelismConfig(kind=kind, num_groups=num_groups, sharding=[sharding], ranks_per_host=ranks_per_host)
    return TableRun(SHAPES, layout, optimizer, SyncConfig(interval=interval, moments=moments), ids, factors)


def check(runs: list[TableRun], num_ranks: int) -> None:
    for run, stepped in zip(runs, run_ranks(step_tables, runs, num_ranks=num_ranks), strict=True):
        synced = STEPS % run.sync.interval == 0 and run.sync.moments is SyncMoments.with_weights
        assert stepped.replicas_equal or not synced
        for table in SHAPES:
            want = expected(run, stepped.before[table], table, num_ranks)
            assert (stepped.tables[table] - stepped.before[table]).abs().max() > 1e-2
            torch.testing.assert_close(stepped.tables[table], want.weight, atol=1e-6, rtol=1e-6)
            for number, moment in enumerate(stepped.moments):
                torch.testing.assert_close(moment[table], want.moments[number], atol=1e-6, rtol=1e-5)


def adagrad(scale: float | str) -> OptimizerConfig:
    # A large eps, so that an eps that is not scaled along with the learning rate would show.
    return OptimizerConfig(TableOptimizer.momentum_scaled_rowwise_adagrad, lr=0.1, eps=0.1, moment_scale=scale)


# A large eps, so that one added elsewhere would show.
OTHERS = [
    OptimizerConfig(TableOptimizer.sgd, lr=0.1),
    OptimizerConfig(TableOptimizer.adagrad, lr=0.1, eps=0.1),
    OptimizerConfig(TableOptimizer.adam, lr=0.1, eps=0.1),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_optimizers_equal_their_formulas(num_ranks):
    optimizers = [adagrad(1.0), adagrad(4.0), *OTHERS]
    check(
        [make_run(num_ranks, 1, sharding, optimizer) for optimizer in optimizers for sharding in ShardingKind],
        num_ranks,
    )


def test_absent_rows_stay_as_they_are():
    runs = [
        make_run(2, groups, ShardingKind.row_wise, optimizer)
        for optimizer in (adagrad(4.0), *OTHERS)
        for groups in (1, 2)
    ]
    for stepped in run_ranks(step_tables, runs, num_ranks=2):
        for table, (rows, _) in SHAPES.items():
            assert torch.equal(stepped.before[table][rows // 2 :], stepped.tables[table][rows // 2 :])
            assert not any(moment[table][rows // 2 :].any() for moment in stepped.moments)


def test_2d_equals_the_algorithm_in_one_process():
    check(
        [
            make_run(4, 2, sharding, optimizer, interval)
            for sharding in ShardingKind
            for optimizer, interval in (
                (adagrad(1.0), 1),
                (adagrad("auto"), 1),
                (adagrad("auto"), 5),
                *((other, 2) for other in OTHERS),
            )
        ]
        + [make_run(4, 4, ShardingKind.row_wise, adagrad("auto"), 5)]
        # Hosts of two ranks: a group's tables and columns are spread over hosts, their rows inside them.
        + [make_run(4, 1, sharding, adagrad(1.0), ranks_per_host=2) for sharding in INSIDE_HOSTS],
        num_ranks=4,
    )


def test_replicas_differ_between_averagings():
    run = make_run(2, 2, ShardingKind.table_wise, adagrad("auto"), interval=STEPS + 1)
    assert run_ranks(step_tables, [run], num_ranks=2)[0].unequal_weights


def test_moments_stay_local_when_they_are_never_averaged():
    run = make_run(2, 2, ShardingKind.table_wise, adagrad(1.0), moments=SyncMoments.never)
    check([run], num_ranks=2)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_small_tables_train_under_every_sharding(num_ranks):
    rng = np.random.default_rng(1)
    runs = []
    for rows, sharding in itertools.product([1, 3, 4, 10], ShardingKind):
        shapes = {"t_a": (rows, 8), "t_b": (rows, 12)}
        layout = ParallelismConfig(kind=ParallelismKind.full_mp, sharding=[sharding], ranks_per_host=num_ranks // 2)
        ids = rng.integers(0, rows, (2, num_ranks, 2, 4))
        factors = rng.normal(size=(2, num_ranks, 4, 20)).astype(np.float32)
        runs.append(TableRun(shapes, layout, OptimizerConfig(TableOptimizer.sgd, lr=1.0), SyncConfig(), ids, factors))
    for run, stepped in zip(runs, run_ranks(step_tables, runs, num_ranks=num_ranks), strict=True):
        for index, (table, columns) in enumerate((("t_a", slice(0, 8)), ("t_b", slice(8, 20)))):
            expected = stepped.before[table].clone()
            for step, rank in itertools.product(range(2), range(num_ranks)):
                part = torch.from_numpy(run.factors[step, rank, :, columns])
                expected.index_add_(0, torch.from_numpy(run.ids[step, rank, index]), part, alpha=-1 / num_ranks)
            torch.testing.assert_close(stepped.tables[table], expected, atol=1e-6, rtol=1e-6)


def test_ranks_without_any_id_neither_hang_nor_train():
    """None, one, and all of four ranks have ids; the last step must find everything in order again."""
    idle = [[2], [0, 1, 2, 3], []]
    layouts = [
        ParallelismConfig(kind=kind, num_groups=groups, sharding=[sharding], ranks_per_host=2)
        for kind, groups in ((ParallelismKind.full_mp, 1), (ParallelismKind.sparse_2d, 2))
        for sharding in ShardingKind
    ]
    results = run_ranks(pool_with_idle_ranks, SHAPES, layouts, idle, num_ranks=4)
    for (layout, ranks), (before, after, pooled) in zip(itertools.product(layouts, idle), results, strict=True):
        for rank, values in enumerate(pooled):
            looked_up = torch.cat([before[name][rank] for name in SHAPES])
            torch.testing.assert_close(values, torch.zeros(2, 16) if rank in ranks else looked_up.expand(2, -1))
        for name, table in before.items():
            # Each of a rank's two bags pulls its row by the mean over the ranks of a gradient of one.
            step = torch.zeros_like(table)
            step[[rank for rank in range(4) if rank not in ranks]] = 2 / 4
            torch.testing.assert_close(after[name], table - step, msg=f"{layout} {ranks}")


def test_rank_layout_is_upstreams():
    cases = list(itertools.product([1, 2, 4], Replicas))
    asked = [(num_groups, replicas is Replicas.inter_host) for num_groups, replicas in cases]
    layouts = run_ranks(upstream_layouts, asked, num_ranks=4)
    assert layouts == [Mesh(4, num_groups, replicas).groups for num_groups, replicas in cases]
