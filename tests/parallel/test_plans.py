"""TorchRec's planner run for a group, and plan files held against it; planning needs no process group."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import PooledSum
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from sparse2d.config import (
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    Replicas,
    ShardingKind,
    TableOptimizer,
)
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh
from sparse2d.optimizers.fused import table_sharder
from sparse2d.parallel.plan_summary import plan_and_summarise, summarise_plan
from sparse2d.parallel.plans import (
    TableSharder,
    allowed_kinds,
    enumerator_of,
    group_topology,
    make_plan,
    table_constraints,
)
from sparse2d.plan import Plan, cover_fault, refuse_stale, write_plan

CPU = torch.device("cpu")
KINDS = st.lists(st.sampled_from(ShardingKind), min_size=1, unique=True)
# (N, ranks of the group on a host)
GROUPS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)])
SMALL = st.sampled_from([1, 2, 3, 4, 5, 7, 9, 10, 17])


def sharder(optimizer: TableOptimizer = TableOptimizer.rowwise_adagrad) -> TableSharder:
    return table_sharder(OptimizerConfig(optimizer), 1, CPU)


def plan_of(shapes, config: ParallelismConfig, group_size: int, local_group_size: int, batch: int = 8) -> Plan:
    return make_plan(
        PooledSum(shapes),
        sharder(),
        config,
        group_size=group_size,
        local_group_size=local_group_size,
        rank_batch_size=batch,
        device=CPU,
    )


def full_mp(*kinds: ShardingKind, **options) -> ParallelismConfig:
    return ParallelismConfig(kind=ParallelismKind.full_mp, sharding=list(kinds), **options)


@given(st.integers(1, 300), GROUPS, KINDS)
def test_kinds_are_left_out_exactly_where_torchrec_would_make_an_empty_shard(rows, group, wanted):
    group_size, local = group

    def fills(kind: ShardingKind) -> bool:
        sizes, _ = calculate_shard_sizes_and_offsets(
            torch.empty(rows, 8, device="meta"), group_size, local, kind.value, col_wise_shard_dim=4
        )
        return all(height > 0 for height, _ in sizes)

    assert allowed_kinds(rows, group_size, local, wanted) == (
        [kind for kind in wanted if fills(kind)] or [ShardingKind.table_wise]
    )


@settings(max_examples=60)
@given(st.lists(st.tuples(SMALL, st.sampled_from([4, 8, 12, 16])), min_size=1, max_size=4), GROUPS, KINDS)
def test_plans_cover_every_table_once_without_empty_shards(tables, group, wanted):
    shapes = {f"t_{number}": shape for number, shape in enumerate(tables)}
    group_size, local = group
    plan = plan_of(shapes, full_mp(*wanted), group_size, local)
    refuse_stale(plan, Path("plan"), plan.layout, shapes)
    for table in plan.tables:
        assert cover_fault(table.rows, table.dim, [(shard.rows, shard.columns) for shard in table.shards]) is None
        assert ShardingKind(table.sharding) in allowed_kinds(table.rows, group_size, local, wanted)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([4, 8, 12])), min_size=1, max_size=4), GROUPS, KINDS)
def test_a_pinned_plan_is_the_plan_that_was_written(tmp_path_factory, tables, group, wanted):
    shapes = {f"t_{number}": shape for number, shape in enumerate(tables)}
    plan = plan_of(shapes, full_mp(*wanted), *group)
    path = tmp_path_factory.getbasetemp() / "pinned.json"
    write_plan(plan, path)
    assert plan_of(shapes, full_mp(*wanted, plan_file=str(path)), *group) == plan


SHAPES = {"t_a": (64, 8), "t_b": (10, 8)}


def move_edge(shards):
    shards[0]["rows"], shards[1]["rows"] = [0, 20], [20, 32]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        # Whole and without overlap, but TorchRec's lookups would look for row 16 on rank 1.
        ("row_wise", move_edge),
        ("row_wise", lambda shards: shards.reverse()),
        ("row_wise", lambda shards: [shard.update(rank=3 - shard["rank"]) for shard in shards]),
        ("table_row_wise", lambda shards: [shard.update(rank=(shard["rank"] + 1) % 4) for shard in shards]),
        ("table_row_wise", lambda shards: shards[1].update(rank=3)),
        ("table_column_wise", lambda shards: [shard.update(rank=3 * place) for place, shard in enumerate(shards)]),
        ("grid_shard", lambda shards: [shard.update(rank=3 - shard["rank"]) for shard in shards]),
        ("column_wise", lambda shards: shards.reverse()),
    ],
)
def test_plans_whose_rows_torchrec_would_not_find_are_refused(kind, change, tmp_path):
    path = tmp_path / "plan.json"
    write_plan(plan_of(SHAPES, full_mp(ShardingKind(kind)), 4, 2), path)
    content = json.loads(path.read_text())
    change(content["tables"][0]["shards"])
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"table t_a is not cut and placed as TorchRec does it for {kind};"):
        plan_of(SHAPES, full_mp(ShardingKind(kind), plan_file=str(path)), 4, 2)


def test_kinds_that_the_options_do_not_allow_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(plan_of(SHAPES, full_mp(ShardingKind.column_wise), 4, 2), path)
    with pytest.raises(UserError, match=r"t_a is column_wise, which .* do not allow: \['row_wise'\]"):
        plan_of(SHAPES, full_mp(ShardingKind.row_wise, plan_file=str(path)), 4, 2)
    with pytest.raises(UserError, match="made for parallelism=full_mp, this run has parallelism=data_parallel"):
        plan_of(SHAPES, ParallelismConfig(kind=ParallelismKind.data_parallel, plan_file=str(path)), 4, 2)


def test_a_pinned_table_that_has_become_too_small_for_its_kind_is_refused(tmp_path):
    """Five rows over four ranks: two on the first two, one on the third, none on the fourth."""
    path = tmp_path / "plan.json"
    plan = plan_of({"t_a": (5, 8)}, full_mp(ShardingKind.table_wise), 4, 2)
    write_plan(replace(plan, tables=[replace(plan.tables[0], sharding="row_wise")]), path)
    with pytest.raises(UserError, match=r"t_a is row_wise, which .* and its 5 rows do not allow: \['table_wise'\]"):
        plan_of({"t_a": (5, 8)}, full_mp(ShardingKind.row_wise, plan_file=str(path)), 4, 2)


@pytest.mark.parametrize(
    ("num_groups", "replicas", "local_size"),
    [
        (1, Replicas.intra_host, 8),
        (2, Replicas.intra_host, 4),
        (4, Replicas.intra_host, 2),
        (2, Replicas.inter_host, 8),
        (4, Replicas.inter_host, 4),
        (8, Replicas.inter_host, 2),
    ],
)
def test_the_planner_sees_the_groups_ranks_of_a_host_and_their_share_of_its_memory(num_groups, replicas, local_size):
    """16 ranks on two hosts of eight."""
    mesh = Mesh(16, num_groups, replicas)
    kind = ParallelismKind.full_mp if num_groups == 1 else ParallelismKind.sparse_2d
    config = ParallelismConfig(kind=kind, num_groups=num_groups, replicas=replicas)
    plan, _ = plan_and_summarise(
        PooledSum(SHAPES), sharder(), config, mesh=mesh, local_world_size=8, rank_batch_size=8, device=CPU
    )
    assert plan.layout.ranks_per_host == local_size
    topology = group_topology(plan.layout, CPU, local_world_size=8)
    assert topology.world_size == mesh.group_size
    assert topology.local_world_size == topology.intra_group_size == local_size
    # Whatever the groups, eight ranks share the memory of a host.
    ddr = {device.storage.ddr for device in topology.devices}
    assert ddr == {psutil.virtual_memory().total // 8}


@pytest.mark.parametrize("optimizer", list(TableOptimizer))
@pytest.mark.parametrize("kind", list(ShardingKind))
def test_the_optimizers_state_counts_as_memory_of_each_shard(kind, optimizer):
    """Row-wise state is one value for each row of each shard: column-wise, each of them keeps its own."""
    module, config = PooledSum(SHAPES), full_mp(kind)
    layout = plan_of(SHAPES, config, 4, 2).layout
    topology = group_topology(layout, CPU, 4)
    constraints = table_constraints(module, config, layout)
    with_state, without = (
        {o.name: o for o in enumerator_of(topology, constraints, 8, one).enumerate(module, [one])}
        for one in (sharder(optimizer), sharder(TableOptimizer.sgd))
    )
    for name, option in with_state.items():
        for shard, plain in zip(option.shards, without[name].shards, strict=True):
            rows, columns = shard.size
            values = {"sgd": 0, "adagrad": columns, "adam": 2 * columns}.get(optimizer.name, 1)
            assert shard.storage.ddr - plain.storage.ddr == rows * values * 4


def test_summaries_count_what_the_plan_holds():
    shapes = {"t_a": (10, 8), "t_b": (6, 4)}
    plan = plan_of(shapes, full_mp(ShardingKind.column_wise), 2, 2)
    summary = summarise_plan(plan, PooledSum(shapes), sharder(), full_mp(ShardingKind.column_wise), 8)
    # Two column shards of t_a, one of t_b, each row with four weights and one value of state.
    assert summary.num_shards == sum(summary.shards_per_rank) == 3
    assert sum(summary.rows_per_rank) == 10 + 10 + 6
    assert summary.bytes_per_rank == [rows * (4 + 1) * 4 for rows in summary.rows_per_rank]
    assert summary.imbalance == max(summary.bytes_per_rank) / (sum(summary.bytes_per_rank) / 2)
    assert all(load > 0 for load in summary.load_ms_per_rank)
    assert summary.load_imbalance == pytest.approx(max(summary.load_ms_per_rank) / (sum(summary.load_ms_per_rank) / 2))
    assert summary.as_record()["imbalance"] == summary.imbalance


def test_replicated_tables_are_whole_on_every_rank():
    plan = plan_of(SHAPES, ParallelismConfig(kind=ParallelismKind.data_parallel), 4, 4)
    refuse_stale(plan, Path("plan"), plan.layout, SHAPES)
    config = ParallelismConfig(kind=ParallelismKind.data_parallel)
    summary = summarise_plan(plan, PooledSum(SHAPES), sharder(), config, 8)
    assert summary.rows_per_rank == [74] * 4
    assert summary.sharding == {"t_a": "data_parallel", "t_b": "data_parallel"}


def test_tables_that_do_not_fit_are_told_in_one_line():
    rows = psutil.virtual_memory().total // 32
    with pytest.raises(UserError, match=r"no plan with parallelism.sharding=\['row_wise'\]: .*GiB \(t_a ") as raised:
        plan_of({"t_a": (rows, 8)}, full_mp(ShardingKind.row_wise), 4, 4)
    assert "\n" not in str(raised.value)
