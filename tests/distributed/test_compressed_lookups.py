"""Training with compressed lookups, on real ranks: at density 1 as without, and bit for bit whatever stands between."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import CheckpointedRun, train_with_checkpoints
from configs import tiny_train
from ranks import Trained, train_all, train_through

from sparse2d.config import (
    DenseOptimizer,
    LookupCompressionConfig,
    LookupMethod,
    ParallelismKind,
    Pipeline,
    ShardingKind,
    TableOptimizer,
    TrainConfig,
    ValueDtype,
)
from sparse2d.launch import run_ranks

STEPS = 8
ADAGRAD = {"optimizer": TableOptimizer.rowwise_adagrad, "dense": DenseOptimizer.adam}
KINDS = (ShardingKind.table_wise, ShardingKind.row_wise, ShardingKind.column_wise)
INSIDE_HOSTS = (ShardingKind.table_row_wise, ShardingKind.grid_shard)
DCT = LookupCompressionConfig(method=LookupMethod.dct, density=0.2, lifetime=3, warmup_steps=2)


def layouts(folder: Path) -> dict[str, TrainConfig]:
    """Every way to cut tables, full model parallel and 2D, and all of them together."""
    full = {kind.name: tiny_train(folder, num_ranks=4, sharding=[kind]) for kind in KINDS + INSIDE_HOSTS}
    two_d = {
        f"2d {kind.name}": tiny_train(folder, ParallelismKind.sparse_2d, num_groups=2, num_ranks=4, sharding=[kind])
        for kind in KINDS
    }
    for kind in INSIDE_HOSTS:
        # Two hosts of two.
        full[kind.name].parallelism.ranks_per_host = 2
    return full | two_d | {"mixed": tiny_train(folder, num_ranks=4, **ADAGRAD)}


def compressed(config: TrainConfig, lookup: LookupCompressionConfig) -> TrainConfig:
    return replace(config, compression=replace(config.compression, lookup=lookup))


def largest_difference(one: Trained, other: Trained) -> float:
    pairs = [(one.tables[k], other.tables[k]) for k in one.tables] + [(one.dense[k], other.dense[k]) for k in one.dense]
    return max((a - b).abs().max().item() for a, b in pairs)


def test_density_one_is_training_without_compression(tmp_path, tiny_dataset):
    everything = LookupCompressionConfig(method=LookupMethod.dct, density=1.0)
    plain = layouts(tmp_path)
    configs = [*plain.values(), *(compressed(config, everything) for config in plain.values())]
    trained = run_ranks(train_all, configs, tiny_dataset, STEPS, num_ranks=4)
    for name, one, other in zip(plain, trained, trained[len(plain) :], strict=False):
        assert largest_difference(one, other) <= 1e-6, name
        assert one.metrics.ne == pytest.approx(other.metrics.ne, abs=1e-6), name


def test_pipelined_steps_and_evaluations_between_them_give_the_same_bits(tmp_path, tiny_dataset):
    config = compressed(tiny_train(tmp_path, num_ranks=4, **ADAGRAD), DCT)
    kinds = [Pipeline.none, Pipeline.sparse_dist, Pipeline.none]
    plain, pipelined, again = run_ranks(train_through, config, tiny_dataset, kinds, 3, num_ranks=4)
    assert plain == pipelined == again
    # Something was left out, but not in the first step.
    full, *_ = run_ranks(
        train_through, tiny_train(tmp_path, num_ranks=4, **ADAGRAD), tiny_dataset, [Pipeline.none], 3, num_ranks=4
    )
    assert full.losses[0] == plain.losses[0]
    assert full.losses[1:] != plain.losses[1:]


@pytest.mark.parametrize("saved", [1, 4])
def test_resumed_runs_end_with_the_same_bits(tmp_path, tiny_dataset, saved):
    """Saved in warm-up, and between two refreshes of the thresholds (steps 3 and 6)."""
    layout = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_groups=2, num_ranks=4, interval=2, **ADAGRAD)
    config = compressed(layout, DCT)
    config.checkpoint.interval = saved
    runs = [("straight", STEPS), ("stopped", saved + 1), ("stopped", STEPS)]
    straight, _, resumed = run_ranks(
        train_with_checkpoints,
        [CheckpointedRun(config, tmp_path / name, stop) for name, stop in runs],
        tiny_dataset,
        num_ranks=4,
    )
    assert resumed.resumed_step >= saved
    for one, other in zip(straight.tables, resumed.tables, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(straight.dense[name], resumed.dense[name]) for name in straight.dense)


METHODS = {
    "bf16 codec": LookupCompressionConfig(method=LookupMethod.qcomm_bf16),
    "fp16 codec": LookupCompressionConfig(method=LookupMethod.qcomm_fp16),
    "int8 codec": LookupCompressionConfig(method=LookupMethod.qcomm_int8),
    "top-k, all": LookupCompressionConfig(method=LookupMethod.topk, density=1.0, value_dtype=ValueDtype.bf16),
    "top-k, half": LookupCompressionConfig(method=LookupMethod.topk, density=0.5),
}


@pytest.mark.parametrize("kind", [ShardingKind.table_wise, ShardingKind.row_wise])
def test_comparators_change_training_a_little(tmp_path, tiny_dataset, kind):
    plain = tiny_train(tmp_path, num_ranks=2, sharding=[kind])
    plain.global_batch_size = 64
    configs = [plain, *(compressed(plain, lookup) for lookup in METHODS.values())]
    exact, *others = run_ranks(train_all, configs, tiny_dataset, STEPS, num_ranks=2)
    for name, other in zip(METHODS, others, strict=True):
        assert 0 < largest_difference(exact, other) < 0.1, name
        assert other.losses == pytest.approx(exact.losses, abs=0.05), name
