"""Plans on real ranks: pinned ones train alike, what they say is what is held, and a wrong start is noticed."""

import re

import numpy as np
import pytest
import torch
from configs import tiny_train
from ranks import TableRun, build_with_another_seed, held_bytes, start_with_faults, train_all

from sparse2d.config import (
    DenseOptimizer,
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    ShardingKind,
    SyncConfig,
    TableOptimizer,
)
from sparse2d.data.dataset import open_dataset
from sparse2d.launch import RanksFailedError, run_ranks
from sparse2d.plan import write_plan
from sparse2d.planning import plan_here


def test_a_pinned_plan_trains_bit_for_bit_like_a_planned_one(tmp_path, tiny_dataset):
    configs = []
    for number, (kind, groups, sharding) in enumerate(
        [
            (ParallelismKind.full_mp, 1, None),
            (ParallelismKind.sparse_2d, 2, list(ShardingKind)),
            (ParallelismKind.sparse_2d, 2, [ShardingKind.grid_shard]),
        ]
    ):
        for pinned in (False, True):
            config = tiny_train(
                tmp_path,
                kind,
                num_ranks=4,
                num_groups=groups,
                sharding=sharding,
                optimizer=TableOptimizer.rowwise_adagrad,
                dense=DenseOptimizer.adam,
            )
            if pinned:
                plan, _ = plan_here(config, open_dataset(tiny_dataset).num_embeddings)
                path = tmp_path / f"plan-{number}.json"
                write_plan(plan, path)
                config.parallelism.plan_file = str(path)
            configs.append(config)
    trained = run_ranks(train_all, configs, tiny_dataset, 5, num_ranks=4)
    for planned, pinned in zip(trained[::2], trained[1::2], strict=True):
        assert planned.losses == pinned.losses
        assert planned.metrics == pinned.metrics
        parts = [(one.tables, one.dense, *one.moments) for one in (planned, pinned)]
        for ours, theirs in zip(*parts, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_kernels_hold_the_bytes_that_the_plan_counts():
    shapes = {"t_a": (64, 8), "t_b": (30, 16)}
    nothing = np.zeros(0)
    runs = [
        TableRun(
            shapes,
            ParallelismConfig(kind=ParallelismKind.sparse_2d, num_groups=2, sharding=[kind]),
            OptimizerConfig(optimizer),
            SyncConfig(),
            nothing,
            nothing,
        )
        for kind in ShardingKind
        for optimizer in TableOptimizer
    ]
    for run, (planned, held) in zip(runs, run_ranks(held_bytes, runs, num_ranks=4), strict=True):
        assert planned == held, (run.parallelism.sharding, run.optimizer.name)


# Layout, groups, fault, and what is told.
WRONG_STARTS = [
    (ParallelismKind.sparse_2d, 2, "none", None),
    (
        ParallelismKind.sparse_2d,
        2,
        "weight",
        r"table t_C\d+, rows .*, columns .*, differs between ranks \[\d\] and \[\d\]$",
    ),
    (ParallelismKind.full_mp, 1, "dense", r"parameter .*over_arch.* differs between ranks \[0, 1, 3\] and \[2\]$"),
    (ParallelismKind.data_parallel, 1, "weight", r"table t_C\d+, .* differs between ranks \[0, 1, 3\] and \[2\]$"),
    (
        ParallelismKind.sparse_2d,
        2,
        "shape",
        r"table t_C1 in group 0 \(ranks \[0, 2\]\): rows 40 to 41 of .* on no rank",
    ),
]


def test_a_wrong_start_is_told_on_every_rank(tmp_path, tiny_dataset):
    cases = [
        (tiny_train(tmp_path, kind, num_ranks=4, num_groups=groups), fault) for kind, groups, fault, _ in WRONG_STARTS
    ]
    all_told = run_ranks(start_with_faults, cases, tiny_dataset, 2, num_ranks=4)
    for (_, _, _, message), told in zip(WRONG_STARTS, all_told, strict=True):
        assert len(set(told)) == 1
        if message is None:
            assert told[0] is None
        else:
            assert told[0] is not None
            assert told[0].startswith("the ranks do not start as planned: ")
            assert re.search(message, told[0]), told[0]


def test_no_run_starts_from_replicas_that_differ(tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2)
    with pytest.raises(RanksFailedError, match=r"not start as planned: table t_C\d+, .* between ranks \[2\] and \[3\]"):
        run_ranks(build_with_another_seed, config, tiny_dataset, 3, num_ranks=4)
