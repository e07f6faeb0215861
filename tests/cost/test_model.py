"""Step time and memory: by hand on one small case, and laws that hold for any workload."""

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from workloads import hardware, options, simulations, workload

from sparse2d.config import Pipeline, Replicas, ShardingKind, SyncRows
from sparse2d.cost.config import Collectives
from sparse2d.cost.model import predict
from sparse2d.cost.network import all_reduce_s, replicas_per_host
from sparse2d.mesh import Mesh


def test_one_table_each_on_two_ranks_by_hand():
    # 100 samples a rank; each rank looks up 200 x 10 rows of 256 bytes, and sends 100 vectors of 256 bytes.
    machine = hardware(gpus_per_host=1)
    config = options(workload([1000, 1000], [64, 64], [10, 10]), num_gpus=2, machine=machine)
    step = predict(config).step
    assert step.lookup == pytest.approx(200 * 10 * 256 / 1e12)
    assert step.update == pytest.approx(2 * step.lookup)
    assert step.output_dist == step.gradient_dist == pytest.approx(100 * 256 / 10e9)
    assert step.dense == pytest.approx(100 * 1e9 / 100e12)
    # A million gradients of 4 bytes fill one bucket, and only when the backward pass is over.
    assert step.dense_all_reduce == pytest.approx(4e6 / 10e9)
    assert step.averaging == step.input_dist == 0
    assert predict(config).qps == pytest.approx(200 / step.total)


def test_memory_of_the_same_by_hand():
    config = options(workload([1000, 1000], [64, 64], [10, 10], dense_memory_gb=2.0), num_gpus=2)
    memory = predict(config).memory
    assert memory.weights == 1000 * 256
    assert memory.optimizer_state == 1000 * 4
    assert memory.id_buffers == 6 * 200 * (10 * 8 + 4)
    # 200 vectors to send, 100 of each table received, and their gradients.
    assert memory.pooled_buffers == 200 * 256 + 2 * 100 * 2 * 256
    assert memory.dense == 2e9
    assert memory.averaging == 0


def test_averaging_is_a_ring_over_the_replicas():
    config = options(workload([1_000_000] * 2, [64] * 2, [1] * 2), num_gpus=8, num_groups=4)
    shard = 1_000_000 * (256 + 4)
    inside = predict(config)
    assert inside.sent.averaging.max() == pytest.approx(2 * 3 / 4 * shard)
    assert inside.step.averaging == pytest.approx(2 * 3 / 4 * shard / 100e9)
    # Groups inside hosts of 4: two groups on each, so that rings of two replicas leave each host.
    between = replace(config, parallelism=replace(config.parallelism, replicas=Replicas.inter_host))
    assert predict(between).step.averaging == pytest.approx(2 * 3 / 4 * shard / 20e9)
    seldom = replace(config, sync=replace(config.sync, interval=4))
    assert predict(seldom).step.averaging == pytest.approx(inside.step.averaging / 4)


def test_a_large_ring_leaves_a_host_through_all_its_interfaces():
    machine = hardware()
    assert all_reduce_s(1e9, 16, 4, machine) == pytest.approx(2 * 15 / 16 * 1e9 / 40e9)
    assert all_reduce_s(1e9, 4, 4, machine) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9)
    assert all_reduce_s(1e9, 1, 1, machine) == 0
    assert replicas_per_host(Mesh(64, 16), 8) == 8
    assert replicas_per_host(Mesh(64, 4), 8) == 4
    assert replicas_per_host(Mesh(64, 4, Replicas.inter_host), 8) == 1


def test_ranks_that_share_an_interface_share_its_rate():
    # Two hosts of 4 ranks; each rank sends 100 vectors of 256 bytes to each of the 4 ranks of the other host.
    tables = workload([1000] * 8, [64] * 8, [1] * 8)
    alone = predict(options(tables, 8))
    shared = predict(options(tables, 8, machine=hardware(gpus_per_nic=4)))
    assert alone.step.output_dist == pytest.approx(4 * 100 * 256 / 10e9)
    assert shared.step.output_dist == pytest.approx(4 * alone.step.output_dist)
    # Groups that are spread over the hosts: a rank sends two vectors of a sample to two ranks, and both groups at once.
    halved = predict(options(tables, 8, num_groups=2, machine=hardware(gpus_per_nic=4)))
    assert halved.step.output_dist == pytest.approx(shared.step.output_dist)
    # A ring crosses from host to host once, at the interface's whole rate.
    assert all_reduce_s(1e9, 8, 4, hardware(gpus_per_nic=4)) == pytest.approx(2 * 7 / 8 * 1e9 / 10e9)


def test_gloo_sends_partial_sums_around_a_ring_twice_and_their_gradients_once():
    config = options(workload([100_000], [64], [1]), 4, machine=hardware(gpus_per_host=1, collectives=Collectives.gloo))
    config.parallelism = replace(
        config.parallelism, sharding=[ShardingKind.table_wise, ShardingKind.row_wise], split_rows_above_gb=0.0
    )
    found = predict(config)
    vectors = 100 * 256
    assert found.step.output_dist == pytest.approx(2 * 3 * vectors / 10e9)
    assert found.step.gradient_dist == pytest.approx(3 * vectors / 10e9)
    # Ids and lengths go to each other rank as well.
    ids = 3 * 100 * (8 / 4 + 4)
    assert found.sent.lookup == pytest.approx((2 + 1) * 3 * vectors + ids)


def test_ids_wait_for_nothing_without_a_pipeline():
    config = options(workload([1000] * 4, [64] * 4, [10] * 4), 4, machine=hardware(gpus_per_host=1))
    assert predict(config).step.input_dist == 0
    assert predict(replace(config, pipeline=Pipeline.none)).step.input_dist == pytest.approx(3 * 100 * 84 / 10e9)


def test_touched_rows_follow_the_batch_not_the_table():
    def averaged(rows, how):
        config = options(workload([rows] * 2, [64] * 2, [1] * 2), num_gpus=4, num_groups=2)
        return predict(replace(config, sync=replace(config.sync, rows=how))).sent.averaging.max()

    assert averaged(10**7, SyncRows.all) == pytest.approx(10 * averaged(10**6, SyncRows.all))
    assert averaged(10**7, SyncRows.touched) == pytest.approx(averaged(10**6, SyncRows.touched), rel=1e-2)
    # 400 samples of one id: hardly fewer than 400 distinct rows of 256 + 4 bytes, and 200 numbers of a replica's own.
    assert averaged(10**7, SyncRows.touched) == pytest.approx(400 * 260 + 200 * 4, rel=1e-2)
    # Of a table of 10 rows all are touched: the ids are then too much.
    assert averaged(10, SyncRows.auto) == averaged(10, SyncRows.all) < averaged(10, SyncRows.touched)


def test_overlap_hides_exchanges_behind_the_dense_part():
    config = options(workload([1000] * 4, [64] * 4, [10] * 4), num_gpus=4, machine=hardware(gpus_per_host=1))
    alone = predict(config)
    hidden = predict(replace(config, constants=replace(config.constants, overlap_share=1.0)))
    assert alone.step.output_dist == alone.exchange > 0
    assert hidden.step.output_dist == hidden.step.gradient_dist == 0
    assert hidden.step.total == pytest.approx(alone.step.total - 2 * alone.exchange)


@settings(max_examples=150)
@given(simulations())
def test_all_figures_are_finite_and_none_is_negative(config):
    found = predict(config)
    figures = [
        *asdict(found.step).values(),
        *asdict(found.memory).values(),
        found.qps,
        *found.sent.lookup,
        *found.sent.averaging,
    ]
    assert all(math.isfinite(value) and value >= 0 for value in figures)
    assert found.hidden >= -1e-12
    assert all(value >= 1 - 1e-9 for value in found.imbalance.values())


@settings(max_examples=150)
@given(simulations())
def test_perfect_balance_never_takes_longer(config):
    # With half a host, balanced ranks load its interface less than the others'.
    assume(config.num_gpus % config.hardware.gpus_per_nic == 0)
    balanced = predict(config, balanced=True)
    assert balanced.step.total <= predict(config).step.total * (1 + 1e-9)


@settings(max_examples=60)
@given(simulations())
def test_one_group_is_full_model_parallelism_whatever_the_averaging_options(config):
    config.parallelism.num_groups = 1
    plain = replace(
        config,
        parallelism=replace(config.parallelism, replicas=Replicas.intra_host),
        sync=replace(config.sync, interval=1, rows=SyncRows.all),
    )
    found, expected = predict(config), predict(plain)
    assert found.step == expected.step
    assert found.step.averaging == 0
    assert found.memory.averaging == 0


RATES = ["nic_gb_per_s", "host_gb_per_s", "memory_gb_per_s", "peak_tflops"]


@settings(max_examples=150)
@given(simulations(), st.sampled_from([*RATES, "alltoall_efficiency", "overlap_share"]), st.floats(1.0, 20.0))
def test_more_bandwidth_never_takes_longer(config, name, factor):
    part = "hardware" if name in RATES else "constants"
    value = getattr(getattr(config, part), name) * factor
    assume(part == "hardware" or value <= 1)
    faster = replace(config, **{part: replace(getattr(config, part), **{name: value})})
    assert predict(faster).step.total <= predict(config).step.total * (1 + 1e-9)


@settings(max_examples=60)
@given(simulations())
def test_slow_hosts_and_latency_only_cost(config):
    calm = replace(config, hardware=replace(config.hardware, slow_host_share=0.0, latency_us=0.0))
    assert predict(calm).step.total <= predict(config).step.total * (1 + 1e-9)


def test_hosts_that_are_slow_cost_more_with_more_of_them():
    machine = hardware(slow_host_share=0.005, slow_host_excess=0.1)
    tables = workload([1000] * 4, [64] * 4, [1] * 4)
    dense = [predict(options(tables, gpus, gpus // 4, machine)).step.dense for gpus in (4, 400, 40000)]
    unhindered = predict(options(tables, 4)).step.dense
    assert dense[0] == pytest.approx(unhindered * 1.0005)
    assert dense[0] < dense[1] < dense[2] <= unhindered * 1.1


@pytest.mark.parametrize("kind", [ShardingKind.row_wise, ShardingKind.column_wise])
def test_splitting_a_hot_table_balances(kind):
    config = options(workload([4_000_000, 1000, 1000, 1000], [256] * 4, [100, 1, 1, 1]), num_gpus=4)
    whole = replace(config, parallelism=replace(config.parallelism, sharding=[ShardingKind.table_wise]))
    split = replace(
        config,
        parallelism=replace(config.parallelism, sharding=[ShardingKind.table_wise, kind], split_rows_above_gb=0.1),
    )
    assert predict(whole).imbalance["lookups"] > 3.5
    assert predict(split).imbalance["time"] < 1.3
