"""Fused kernels and averaging on real ranks against the reference formulas on whole tables."""

import numpy as np
import pytest
import torch
from ranks import TableRun, step_tables, upstream_layout

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
from sparse2d.optimizers import reference

SHAPES = {"t_a": (12, 8), "t_b": (30, 8)}
STEPS, BATCH, IDS_PER_BAG = 5, 6, 3


def make_run(
    num_ranks: int,
    num_groups: int,
    sharding: ShardingKind,
    optimizer: OptimizerConfig,
    interval: int = 1,
    moments: SyncMoments = SyncMoments.with_weights,
) -> TableRun:
    """Ids with many repeats (inside a bag, a batch, and across ranks) and rows that never occur."""
    rng = np.random.default_rng(0)
    limits = np.array([rows // 2 for rows, _ in SHAPES.values()])[:, None]
    ids = rng.integers(0, limits, (STEPS, num_ranks, len(SHAPES), BATCH * IDS_PER_BAG))
    factors = rng.normal(size=(STEPS, num_ranks, BATCH, sum(dim for _, dim in SHAPES.values()))).astype(np.float32)
    kind = ParallelismKind.full_mp if num_groups == 1 else ParallelismKind.sparse_2d
    layout = ParallelismConfig(kind=kind, num_groups=num_groups, sharding=[sharding])
    return TableRun(SHAPES, layout, optimizer, SyncConfig(interval=interval, moments=moments), ids, factors)


def gradient(run: TableRun, step: int, rank: int, table: str) -> torch.Tensor:
    """Dense gradient of one rank's loss, by torch's autograd on a plain table."""
    index = list(SHAPES).index(table)
    weight = torch.zeros(SHAPES[table], requires_grad=True)
    bags = torch.from_numpy(run.ids[step, rank, index]).view(BATCH, IDS_PER_BAG)
    columns = slice(8 * index, 8 * index + 8)
    (weight[bags].sum(dim=1) * torch.from_numpy(run.factors[step, rank, :, columns])).sum().backward()
    return weight.grad


def expected(run: TableRun, before: torch.Tensor, table: str, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's algorithm in one process: every group steps on its own mean gradient, then replicas are averaged."""
    mesh = Mesh(num_ranks, run.parallelism.num_groups)
    weights = [before.clone() for _ in mesh.groups]
    column_shards = [slice(0, 8)]
    if run.parallelism.sharding == [ShardingKind.column_wise]:
        column_shards = [slice(start, start + 4) for start in (0, 4)]
    moments = [torch.zeros(SHAPES[table]) for _ in mesh.groups]
    for step in range(STEPS):
        for group, ranks in enumerate(mesh.groups):
            grad = torch.stack([gradient(run, step, rank, table) for rank in ranks]).mean(dim=0)
            for columns in column_shards:
                _reference_step(run, weights[group][:, columns], grad[:, columns], moments[group][:, columns])
        if (step + 1) % run.sync.interval == 0:
            weights = [reference.average_replicas(weights).clone() for _ in mesh.groups]
            if run.sync.moments is SyncMoments.with_weights:
                moments = [reference.average_replicas(moments).clone() for _ in mesh.groups]
    return weights[-1], moments[-1]


def _reference_step(run: TableRun, weight: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor) -> None:
    """One reference step; the row-wise moment is kept spread over the columns of its shard."""
    config = run.optimizer
    if config.name is TableOptimizer.sgd:
        reference.sgd(weight, grad, lr=config.lr)
        return
    row_moment = moment[:, 0].clone()
    scale = run.parallelism.num_groups if config.moment_scale == "auto" else config.moment_scale
    reference.rowwise_adagrad(weight, grad, row_moment, lr=config.lr, eps=config.eps, moment_scale=scale)
    moment.copy_(row_moment.unsqueeze(1).expand_as(moment))


def check(runs: list[TableRun], num_ranks: int) -> None:
    for run, (before, tables, moments, equal) in zip(
        runs, run_ranks(step_tables, runs, num_ranks=num_ranks), strict=True
    ):
        synced = STEPS % run.sync.interval == 0 and run.sync.moments is SyncMoments.with_weights
        assert equal or not synced
        for table in SHAPES:
            weight, moment = expected(run, before[table], table, num_ranks)
            assert (tables[table] - before[table]).abs().max() > 1e-2
            torch.testing.assert_close(tables[table], weight, atol=1e-6, rtol=1e-6)
            if run.optimizer.name is not TableOptimizer.sgd:
                torch.testing.assert_close(moments[table], moment, atol=1e-6, rtol=1e-5)


def adagrad(scale: float | str) -> OptimizerConfig:
    # A large eps, so that an eps that is not scaled along with the learning rate would show.
    return OptimizerConfig(TableOptimizer.momentum_scaled_rowwise_adagrad, lr=0.1, eps=0.1, moment_scale=scale)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_optimizers_equal_their_formulas(num_ranks):
    optimizers = [adagrad(1.0), adagrad(4.0), OptimizerConfig(TableOptimizer.sgd, lr=0.1)]
    check(
        [make_run(num_ranks, 1, sharding, optimizer) for optimizer in optimizers for sharding in ShardingKind],
        num_ranks,
    )


def test_absent_rows_stay_as_they_are():
    run = make_run(1, 1, ShardingKind.table_wise, adagrad(4.0))
    before, after, moments, _ = run_ranks(step_tables, [run], num_ranks=1)[0]
    for table, (rows, _) in SHAPES.items():
        assert torch.equal(before[table][rows // 2 :], after[table][rows // 2 :])
        assert not moments[table][rows // 2 :].any()


def test_2d_equals_the_algorithm_in_one_process():
    check(
        [
            make_run(4, 2, sharding, optimizer, interval)
            for sharding in ShardingKind
            for optimizer, interval in ((adagrad(1.0), 1), (adagrad("auto"), 1), (adagrad("auto"), 5))
        ]
        + [make_run(4, 4, ShardingKind.row_wise, adagrad("auto"), 5)],
        num_ranks=4,
    )


def test_replicas_differ_between_averagings():
    run = make_run(2, 2, ShardingKind.table_wise, adagrad("auto"), interval=STEPS + 1)
    *_, equal = run_ranks(step_tables, [run], num_ranks=2)[0]
    assert not equal


def test_moments_stay_local_when_they_are_never_averaged():
    run = make_run(2, 2, ShardingKind.table_wise, adagrad(1.0), moments=SyncMoments.never)
    check([run], num_ranks=2)


@pytest.mark.parametrize("rows", [1, 3, 4, 10])
@pytest.mark.parametrize("sharding", list(ShardingKind))
def test_small_tables_train_under_every_sharding(rows, sharding):
    rng = np.random.default_rng(1)
    shapes = {"t_a": (rows, 8), "t_b": (rows, 8)}
    layout = ParallelismConfig(kind=ParallelismKind.full_mp, sharding=[sharding])
    ids = rng.integers(0, rows, (2, 8, 2, 4))
    factors = rng.normal(size=(2, 8, 4, 16)).astype(np.float32)
    run = TableRun(shapes, layout, OptimizerConfig(TableOptimizer.sgd, lr=1.0), SyncConfig(), ids, factors)
    before, after, _, _ = run_ranks(step_tables, [run], num_ranks=8)[0]
    for index, table in enumerate(shapes):
        expected = before[table].clone()
        for step in range(2):
            grad = torch.zeros_like(expected)
            for rank in range(8):
                part = torch.from_numpy(factors[step, rank, :, 8 * index : 8 * index + 8])
                grad.index_add_(0, torch.from_numpy(ids[step, rank, index]), part)
            expected -= grad / 8
        torch.testing.assert_close(after[table], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("replicas", list(Replicas))
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_rank_layout_is_upstreams(num_groups, replicas):
    layout = run_ranks(upstream_layout, num_groups, replicas is Replicas.inter_host, num_ranks=4)
    assert layout == Mesh(4, num_groups, replicas).groups
