"""Emulated ranks against real ones: tables, moments, dense part, losses and evaluation of short trainings."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from configs import tiny_train
from ranks import CPU, Trained, train_all

from sparse2d.config import (
    Combine,
    EngineKind,
    OptimizerConfig,
    ParallelismKind,
    Replicas,
    ShardingKind,
    SyncMoments,
    TableOptimizer,
    TrainConfig,
)
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.emulation.engine import GroupedLookups
from sparse2d.engine import build_engine
from sparse2d.launch import run_ranks
from sparse2d.loop import evaluate
from sparse2d.mesh import RankInfo, process_group

# Two more than a multiple of K = 4, so that replicas differ in the end, and the evaluation must tell them apart.
STEPS = 22
SHARDINGS = (ShardingKind.row_wise, ShardingKind.column_wise, ShardingKind.table_wise)
LR = {TableOptimizer.sgd: 20.0, TableOptimizer.adam: 0.02}


def two_d(
    results_dir: Path,
    optimizer: TableOptimizer,
    num_groups: int,
    interval: int,
    sharding: ShardingKind,
    moments: SyncMoments = SyncMoments.with_weights,
    combine: Combine = Combine.mean,
) -> TrainConfig:
    config = tiny_train(
        results_dir,
        ParallelismKind.sparse_2d,
        num_ranks=4,
        num_groups=num_groups,
        sharding=[sharding],
        interval=interval,
    )
    scale = "auto" if optimizer is TableOptimizer.momentum_scaled_rowwise_adagrad else 1.0
    # With a small eps a gradient of 1e-9 moves a weight as far as one of 1, and rounding with it.
    config.optimizer = OptimizerConfig(
        optimizer, lr=LR.get(optimizer, 0.1), eps=1e-3, moment_scale=scale, dense=config.optimizer.dense
    )
    config.sync.moments, config.sync.combine = moments, combine
    return config


def emulated(config: TrainConfig, dataset: Path) -> Trained:
    """What ``ranks.train_all`` returns, from the emulated engine; of replicas that differ, the last."""
    rank = RankInfo(0, 1, 0, 1)
    config = dataclasses.replace(config, engine=EngineKind.emulated)
    rows = open_dataset(dataset)
    engine = build_engine(config, rows, rank, CPU)
    batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=STEPS)
    losses = [engine.train_step(to_torchrec(batch, CPU), step).item() for step, batch in enumerate(batches, start=1)]
    lookups = engine.model.model.sparse_arch
    assert isinstance(lookups, GroupedLookups)
    last = {name: lookups.tables.table(name) for name in engine.table_shapes}
    moments = [
        {name: state[number][:, -1] for name, (_, state) in last.items()}
        for number in range(len(last[next(iter(last))][1]))
    ]
    dense = {name: value.detach() for name, value in engine.model.named_parameters()}
    return Trained(
        {name: weight[:, -1] for name, (weight, _) in last.items()},
        moments,
        dense,
        losses,
        evaluate(engine, config, rows, rank)[0],
    )


def all_emulated(configs: list[TrainConfig], dataset: Path) -> list[Trained]:
    """On the one rank that ``sparse2d.train`` starts."""
    torch.set_num_threads(1)
    with process_group(CPU):
        return [emulated(config, dataset) for config in configs]


def check(configs: list[TrainConfig], dataset: Path) -> None:
    real = run_ranks(train_all, configs, dataset, STEPS, num_ranks=4)
    for config, one, other in zip(configs, real, run_ranks(all_emulated, configs, dataset, num_ranks=1), strict=True):
        what = f"{config.optimizer.name.name} {config.parallelism} {config.sync}"
        assert len(one.moments) == len(other.moments), what
        assert one.dense.keys() == other.dense.keys(), what
        for name, weight in one.tables.items():
            torch.testing.assert_close(other.tables[name], weight, atol=1e-6, rtol=0, msg=lambda m, w=what: f"{w}\n{m}")
            for a, b in zip(one.moments, other.moments, strict=True):
                # Of moments above 1, a millionth.
                torch.testing.assert_close(b[name], a[name], atol=1e-6, rtol=1e-6, msg=lambda m, w=what: f"{w}\n{m}")
        for name, value in one.dense.items():
            torch.testing.assert_close(other.dense[name], value, atol=1e-6, rtol=0, msg=lambda m, w=what: f"{w}\n{m}")
        assert other.metrics.ne == pytest.approx(one.metrics.ne, abs=1e-6), what
        assert other.metrics.rows == one.metrics.rows == 200


@pytest.mark.slow
def test_every_optimizer_under_both_intervals_and_numbers_of_groups(tmp_path, tiny_dataset):
    settings = itertools.product(TableOptimizer, (1, 4), (2, 4))
    configs = [
        two_d(tmp_path, optimizer, num_groups, interval, SHARDINGS[number % 3])
        for number, (optimizer, interval, num_groups) in enumerate(settings)
    ]
    # Column-wise shards have moments of their own in groups of two ranks only.
    adagrad = TableOptimizer.momentum_scaled_rowwise_adagrad
    configs.append(two_d(tmp_path, adagrad, 2, 4, ShardingKind.column_wise))
    contiguous = two_d(tmp_path, adagrad, 2, 4, ShardingKind.row_wise)
    contiguous.parallelism.replicas = Replicas.inter_host
    check([*configs, contiguous], tiny_dataset)


def test_every_policy_for_moments(tmp_path, tiny_dataset):
    optimizers = (TableOptimizer.rowwise_adagrad, TableOptimizer.adam)
    check(
        [
            two_d(tmp_path, optimizer, 2, interval, ShardingKind.column_wise, moments)
            for optimizer, interval in zip(optimizers, (1, 4), strict=True)
            for moments in (SyncMoments.delayed, SyncMoments.never)
        ],
        tiny_dataset,
    )


def test_full_model_parallelism(tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, num_ranks=4, optimizer=TableOptimizer.rowwise_adagrad)
    config.optimizer.eps = 1e-3
    check([config], tiny_dataset)


@pytest.mark.slow
def test_every_rule(tmp_path, tiny_dataset):
    settings = [
        (TableOptimizer.rowwise_adagrad, 4, 1, ShardingKind.row_wise),
        (TableOptimizer.rowwise_adagrad, 2, 4, ShardingKind.column_wise),
        (TableOptimizer.adam, 4, 4, ShardingKind.table_wise),
        (TableOptimizer.adam, 2, 1, ShardingKind.column_wise),
        (TableOptimizer.adagrad, 4, 1, ShardingKind.column_wise),
        (TableOptimizer.sgd, 2, 4, ShardingKind.table_wise),
    ]
    check(
        [
            two_d(tmp_path, optimizer, groups, 1 if combine is Combine.gradient else interval, kind, combine=combine)
            for combine in Combine
            if combine not in (Combine.auto, Combine.mean)
            for optimizer, groups, interval, kind in settings
            if combine is not Combine.merged_gradient or optimizer.name.endswith("adagrad")
        ],
        tiny_dataset,
    )
