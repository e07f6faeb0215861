"""With SGD and K = 1 every layout gives the same weights; M = 1 is full model parallelism; same config, same bits."""

from pathlib import Path

import pytest
import torch
from configs import tiny_train
from ranks import Trained, dense_steps, train_all, weights_around_evaluation

from sparse2d.config import (
    Combine,
    DenseOptimizer,
    ParallelismConfig,
    ParallelismKind,
    Replicas,
    ShardingKind,
    TableOptimizer,
    TrainConfig,
)
from sparse2d.launch import run_ranks

STEPS = 10
INSIDE_HOSTS = (ShardingKind.table_row_wise, ShardingKind.table_column_wise, ShardingKind.grid_shard)
SCALED = TableOptimizer.momentum_scaled_rowwise_adagrad
ADAGRAD = {"optimizer": TableOptimizer.rowwise_adagrad, "dense": DenseOptimizer.adam}


def run(configs: list[TrainConfig], dataset: Path) -> list[Trained]:
    return run_ranks(train_all, configs, dataset, STEPS, num_ranks=configs[0].launch.num_ranks)


def largest_difference(one: Trained, other: Trained) -> float:
    pairs = [(one.tables[k], other.tables[k]) for k in one.tables] + [(one.dense[k], other.dense[k]) for k in one.dense]
    assert one.tables.keys() == other.tables.keys()
    assert one.dense.keys() == other.dense.keys()
    return max((a - b).abs().max().item() for a, b in pairs)


def bit_equal(one: Trained, other: Trained) -> bool:
    return (
        largest_difference(one, other) == 0
        and len(one.moments) == len(other.moments)
        and all(torch.equal(a[k], b[k]) for a, b in zip(one.moments, other.moments, strict=True) for k in a)
        and one.losses == other.losses
        and one.metrics == other.metrics
    )


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, tiny_dataset) -> Trained:
    return run([tiny_train(tmp_path_factory.mktemp("r"), num_ranks=1)], tiny_dataset)[0]


def test_training_moves_the_weights(one_rank, tmp_path, tiny_dataset):
    start = run_ranks(train_all, [tiny_train(tmp_path, num_ranks=1)], tiny_dataset, 0, num_ranks=1)[0]
    # The comparisons below mean something only if ten steps change weights by far more than their tolerance.
    for table, weight in one_rank.tables.items():
        assert (weight - start.tables[table]).abs().max() > 5e-3, table


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sgd_gives_the_same_weights_in_every_layout(one_rank, num_ranks, tmp_path, tiny_dataset):
    layouts = [(ParallelismKind.full_mp, 1)] + [
        (ParallelismKind.sparse_2d, groups) for groups in (2, 4) if groups <= num_ranks
    ]
    configs = [
        tiny_train(tmp_path, kind, num_ranks=num_ranks, num_groups=groups, sharding=[sharding])
        for kind, groups in layouts
        for sharding in ParallelismConfig().sharding
    ] + [tiny_train(tmp_path, ParallelismKind.data_parallel, num_ranks=num_ranks)]
    for config, trained in zip(configs, run(configs, tiny_dataset), strict=True):
        assert largest_difference(one_rank, trained) < 1e-6, config.parallelism
        assert trained.metrics.ne == pytest.approx(one_rank.metrics.ne, abs=1e-6)


def on_hosts(config: TrainConfig, ranks_per_host: int, replicas: Replicas = Replicas.intra_host) -> TrainConfig:
    config.parallelism.ranks_per_host, config.parallelism.replicas = ranks_per_host, replicas
    return config


def test_contiguous_groups_give_the_same_weights(one_rank, tmp_path, tiny_dataset):
    configs = [
        on_hosts(
            tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2, sharding=kinds),
            4,
            Replicas.inter_host,
        )
        for kinds in [None, *([kind] for kind in INSIDE_HOSTS)]
    ]
    for config, trained in zip(configs, run(configs, tiny_dataset), strict=True):
        assert largest_difference(one_rank, trained) < 1e-6, config.parallelism


def test_sharding_inside_hosts_gives_the_same_weights(one_rank, tmp_path, tiny_dataset):
    """Two hosts of two ranks."""
    configs = [
        on_hosts(tiny_train(tmp_path, num_ranks=4, sharding=kinds), 2)
        for kinds in [*([kind] for kind in INSIDE_HOSTS), list(INSIDE_HOSTS)]
    ]
    for config, trained in zip(configs, run(configs, tiny_dataset), strict=True):
        assert largest_difference(one_rank, trained) < 1e-6, config.parallelism


def test_groups_over_several_hosts_give_the_same_weights(tmp_path, tiny_dataset):
    """2 x 4 ranks: each group has two ranks on each of two hosts, whichever way the groups lie."""
    configs = [
        on_hosts(
            tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=8, num_groups=2, sharding=[kind]), size, replicas
        )
        for replicas, size in ((Replicas.intra_host, 4), (Replicas.inter_host, 2))
        for kind in INSIDE_HOSTS
    ]
    alone = tiny_train(tmp_path, num_ranks=1)
    for config in [alone, *configs]:
        config.global_batch_size = 64
    (expected,) = run([alone], tiny_dataset)
    for config, trained in zip(configs, run(configs, tiny_dataset), strict=True):
        assert largest_difference(expected, trained) < 1e-6, config.parallelism


def test_one_group_equals_full_model_parallelism_bit_for_bit(tmp_path, tiny_dataset):
    configs = [
        tiny_train(tmp_path, kind, num_ranks=4, num_groups=1, sharding=[sharding], **ADAGRAD)
        for sharding in ShardingKind
        for kind in (ParallelismKind.full_mp, ParallelismKind.sparse_2d)
    ]
    trained = run(configs, tiny_dataset)
    for sharding, full_mp, one_group in zip(ShardingKind, trained[::2], trained[1::2], strict=True):
        assert bit_equal(full_mp, one_group), sharding


def test_same_config_and_seed_give_the_same_bits(tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2, interval=3, **ADAGRAD)
    first, second = (run([config], tiny_dataset)[0] for _ in range(2))
    assert bit_equal(first, second)
    config.seed = 1
    assert not bit_equal(first, run([config], tiny_dataset)[0])


def test_adagrad_under_2d_differs_from_full_model_parallelism(tmp_path, tiny_dataset):
    configs = [
        tiny_train(tmp_path, num_ranks=4, **ADAGRAD),
        tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=4, **ADAGRAD),
    ]
    full_mp, two_d = run(configs, tiny_dataset)
    # The reason why the paper scales the moment; were they equal, the comparison would compare nothing.
    assert largest_difference(full_mp, two_d) > 1e-3


def test_data_parallel_tables_equal_full_model_parallelism(tmp_path, tiny_dataset):
    configs = [
        tiny_train(
            tmp_path, kind, num_ranks=2, sharding=[ShardingKind.table_wise], optimizer=optimizer, moment_scale=scale
        )
        for optimizer, scale in [(each, 4.0 if each is SCALED else 1.0) for each in TableOptimizer]
        for kind in (ParallelismKind.full_mp, ParallelismKind.data_parallel)
    ]
    for config in configs:
        # Else a gradient of next to nothing decides a whole step.
        config.optimizer.eps = 1e-3
    trained = run(configs, tiny_dataset)
    for config, full_mp, data_parallel in zip(configs[::2], trained[::2], trained[1::2], strict=True):
        assert largest_difference(full_mp, data_parallel) < 1e-5, config.optimizer
    # Each differs from the others, as it must for the comparison to tell one optimizer from another.
    assert all(largest_difference(a, b) > 1e-3 for a, b in zip(trained[:-2:2], trained[2::2], strict=True))


@pytest.mark.parametrize("name", DenseOptimizer)
def test_the_dense_part_follows_its_optimizers_formula(name, tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, num_ranks=1, dense=name)
    config.optimizer.dense.lr, config.optimizer.dense.eps = 0.037, 0.011
    steps = run_ranks(dense_steps, config, tiny_dataset, 3, num_ranks=1)
    lr, eps = 0.037, 0.011
    for param in steps[0].before:
        first, second = torch.zeros(()), torch.zeros(())
        for number, step in enumerate(steps, start=1):
            gradient, before = step.gradients[param].double(), step.before[param].double()
            if name is DenseOptimizer.sgd:
                change = lr * gradient
            elif name is DenseOptimizer.adagrad:
                second = second + gradient**2
                change = lr * gradient / (second.sqrt() + eps)
            else:
                first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
                change = lr * first / (1 - 0.9**number) / ((second / (1 - 0.999**number)).sqrt() + eps)
            assert gradient.any()
            torch.testing.assert_close(before - change, step.after[param].double(), rtol=1e-5, atol=1e-6)


def test_metrics_do_not_depend_on_the_number_of_ranks(tmp_path, tiny_dataset):
    """Untrained model, so that the weights are the same bits; 200 evaluation rows, 32 per rank and step."""
    metrics = [
        run_ranks(train_all, [tiny_train(tmp_path, num_ranks=n)], tiny_dataset, 0, num_ranks=n)[0].metrics
        for n in (1, 2, 3, 4)
    ]
    for other in metrics[1:]:
        assert other.rows == metrics[0].rows == 200
        assert other.ne == pytest.approx(metrics[0].ne, abs=1e-9)
        assert other.auc == pytest.approx(metrics[0].auc, abs=1e-9)


@pytest.mark.parametrize("optimizer", [TableOptimizer.rowwise_adagrad, TableOptimizer.adam])
def test_evaluation_changes_nothing(optimizer, tmp_path, tiny_dataset):
    config = tiny_train(
        tmp_path, ParallelismKind.sparse_2d, num_ranks=2, num_groups=2, optimizer=optimizer, dense=DenseOptimizer.adam
    )
    assert run_ranks(weights_around_evaluation, config, tiny_dataset, num_ranks=2)


def test_rules_that_merge_gradients_equal_full_model_parallelism(tmp_path, tiny_dataset):
    """After 50 steps at a rate that moves weights by more than a hundredth; the moments, too."""
    configs = []
    for optimizer in (TableOptimizer.rowwise_adagrad, TableOptimizer.adam, TableOptimizer.adagrad):
        options = {"num_ranks": 4, "sharding": [ShardingKind.table_wise], "optimizer": optimizer}
        configs.append(tiny_train(tmp_path, **options))
        for rule in (Combine.gradient, Combine.merged_gradient):
            if rule is Combine.merged_gradient and optimizer is TableOptimizer.adam:
                continue
            configs.append(tiny_train(tmp_path, ParallelismKind.sparse_2d, num_groups=2, **options))
            configs[-1].sync.combine = rule
    for config in configs:
        config.global_batch_size = 24
    (start,) = run_ranks(train_all, configs[:1], tiny_dataset, 0, num_ranks=4)
    for config, trained in zip(configs, run_ranks(train_all, configs, tiny_dataset, 50, num_ranks=4), strict=True):
        if config.parallelism.kind is ParallelismKind.full_mp:
            full_mp = trained
            assert largest_difference(start, full_mp) > 1e-2
            continue
        assert largest_difference(full_mp, trained) < 1e-5, config.sync.combine
        for moments, others in zip(full_mp.moments, trained.moments, strict=True):
            for table in moments:
                torch.testing.assert_close(moments[table], others[table], atol=1e-6, rtol=1e-4)
