"""Placements hold every table once, and volumes are conserved and equal to a count message by message."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from workloads import TABLES, hardware, options, simulations, workload

from sparse2d.cost.model import cluster_of, predict
from sparse2d.cost.placement import DoesNotFitError, Placement, place, shard_costs
from sparse2d.cost.volumes import distinct_rows, volumes
from sparse2d.cost.workload import harmonic, make_workload
from sparse2d.mesh import Mesh


def placed(config):
    tables = make_workload(config.workload)
    cluster = cluster_of(config, tables)
    return tables, cluster, place(tables, cluster, config.parallelism)


@settings(max_examples=60)
@given(simulations())
def test_every_value_of_every_table_is_on_one_rank(config):
    tables, cluster, placement = placed(config)
    values = np.bincount(placement.table, placement.rows * placement.columns, len(tables.rows))
    assert values == pytest.approx(tables.rows * tables.dims)
    assert placement.rank.min() >= 0
    assert placement.rank.max() < cluster.group_size
    # Parts of the columns see all ids; parts of the rows share them.
    ids = np.bincount(placement.table, placement.id_share * placement.columns, len(tables.rows))
    assert ids == pytest.approx(tables.dims)


@settings(max_examples=60)
@given(simulations())
def test_bytes_sent_are_bytes_received(config):
    tables, cluster, placement = placed(config)
    moved = volumes(tables, placement, cluster)
    for traffic in (moved.ids, moved.pooled):
        assert traffic.sent_local.sum() == pytest.approx(traffic.received_local.sum())
        assert traffic.sent_remote.sum() == pytest.approx(traffic.received_remote.sum())


@settings(max_examples=60)
@given(simulations())
def test_memory_over_all_ranks_is_m_copies_of_the_tables_and_their_state(config):
    tables, cluster, placement = placed(config)
    moved = volumes(tables, placement, cluster)
    num_groups = config.parallelism.num_groups
    total = tables.table_bytes.sum()
    assert moved.weights.sum() * num_groups == pytest.approx(total * (1 + (num_groups - 1)))
    # A row of each column-wise shard has its own state.
    rows = placement.rows.sum()
    assert moved.state.sum() == pytest.approx(rows * tables.state_bytes_per_row)


def messages(tables, cluster, placement: Placement):
    """Bytes of ids [from, to] and of pooled rows [from, to], counted for each rank, shard and sample's vector."""
    n, batch = cluster.group_size, tables.batch_per_gpu
    ids, pooled = np.zeros((n, n)), np.zeros((n, n))
    shards = zip(placement.table, placement.rank, placement.columns, placement.id_share, strict=True)
    for (table, owner, columns, share), other in itertools.product(list(shards), range(n)):
        if other != owner:
            ids[other, owner] += batch * (share * tables.pooling[table] * 8 + 4)
            pooled[owner, other] += batch * columns * tables.wire_bytes
    return ids, pooled


@settings(max_examples=30)
@given(simulations())
def test_traffic_is_what_counting_messages_gives(config):
    config.parallelism.sharding = config.parallelism.sharding[:2]  # without a fan
    assume(config.num_gpus <= 64)
    tables, cluster, placement = placed(config)
    moved = volumes(tables, placement, cluster)
    host = np.arange(cluster.group_size) // cluster.ranks_per_host
    local = host[:, None] == host[None, :]
    for traffic, matrix in zip((moved.ids, moved.pooled), messages(tables, cluster, placement), strict=True):
        assert traffic.sent_local == pytest.approx((matrix * local).sum(1))
        assert traffic.sent_remote == pytest.approx((matrix * ~local).sum(1))
        assert traffic.received_local == pytest.approx((matrix * local).sum(0))
        assert traffic.received_remote == pytest.approx((matrix * ~local).sum(0))


def test_rows_inside_a_host_send_one_vector_over_the_network():
    tables = workload([1_000_000], [64], [10])
    config = options(tables, num_gpus=8)
    config.parallelism.split_rows_above_gb = 0.0
    sent = {}
    for kind in ("row_wise", "table_row_wise"):
        config.parallelism.sharding = [type(config.parallelism.sharding[0])[kind]]
        made, cluster, placement = placed(config)
        sent[kind] = volumes(made, placement, cluster).pooled
    one_vector = 8 * 100 * 64 * 4
    # Row-wise: each of 8 ranks sends its partial sums to 4 ranks of the other host.
    assert sent["row_wise"].sent_remote.sum() == 8 * one_vector / 8 * 4
    # Inside a host: the 4 ranks that hold the table sum first, then half of the vectors leave.
    assert sent["table_row_wise"].sent_remote.sum() == one_vector / 2
    # For that each keeps a quarter of the sums and sends three; then come the vectors of the host's own ranks.
    assert sent["table_row_wise"].sent_local[:4] == pytest.approx(one_vector * (3 / 4 + 3 / 8 / 4))


@settings(max_examples=25)
@given(TABLES)
def test_greedy_is_within_its_bound_of_the_best_assignment(tables):
    """Graham's bound of longest processing time first, 4/3 - 1/(3N), against all assignments."""
    tables = tables[:6]
    config = options(workload([t.rows for t in tables], [t.dim for t in tables], [t.pooling for t in tables]), 3)
    config.parallelism.sharding = config.parallelism.sharding[:1]
    made, cluster, placement = placed(config)
    cost = shard_costs(made, cluster, np.arange(len(tables)), made.rows, made.dims, np.ones(len(tables)))
    ours = np.bincount(placement.rank, cost[placement.table], 3).max()
    best = min(np.bincount(np.array(ranks), cost, 3).max() for ranks in itertools.product(range(3), repeat=len(tables)))
    assert ours <= best * (4 / 3 - 1 / 9) * (1 + 1e-9)


def test_tables_go_where_there_is_room():
    # Two costly tables of 60 GB each do not fit one rank of 80 GB.
    tables = workload([230_000_000, 230_000_000, 10], [64, 64, 64], [1, 1, 300])
    config = options(tables, num_gpus=2)
    config.parallelism.sharding = config.parallelism.sharding[:1]
    _, _, placement = placed(config)
    assert placement.rank[0] != placement.rank[1]


def test_what_a_group_or_a_rank_cannot_hold_is_refused_with_the_numbers():
    config = options(workload([1_000_000_000], [64], [1]), num_gpus=4, num_groups=2)
    with pytest.raises(DoesNotFitError, match=r"take 260\.0 GB, a group of 2 ranks has 160\.0 GB for them"):
        predict(config)
    config = options(workload([500_000_000], [64], [1]), num_gpus=4)
    config.parallelism.sharding = config.parallelism.sharding[:1]
    with pytest.raises(DoesNotFitError, match=r"table_0 takes 130\.0 GB on one rank, which has 80\.0 GB"):
        predict(config)


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("rows", [1, 5, 1000, 30_000])
def test_distinct_rows_and_harmonic_sums_are_the_exact_ones(zipf, rows):
    ranks = np.arange(1, rows + 1.0)
    weights = ranks**-zipf
    total = harmonic(np.array([rows * 1.0]), np.array([zipf]))[0]
    assert total == pytest.approx(weights.sum(), rel=1e-3)
    for draws in (1, 100, 100_000):
        exact = (1 - np.exp(-draws * weights / weights.sum())).sum()
        found = distinct_rows(np.array([rows * 1.0]), np.array([zipf]), np.array([draws * 1.0]))[0]
        assert found == pytest.approx(exact, rel=0.02)


def test_a_mesh_decides_how_many_ranks_of_a_group_share_a_host():
    config = options(workload([100] * 8, [64] * 8, [1] * 8), num_gpus=16, num_groups=2)
    tables = make_workload(config.workload)
    assert cluster_of(config, tables).ranks_per_host == Mesh(16, 2).local_group_size(4) == 2
    alone = replace(config, hardware=hardware(gpus_per_host=64))
    assert cluster_of(alone, tables).ranks_per_host == 8
