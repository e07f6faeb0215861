"""What ranks are found to hold, against the plan, the tables' shapes and each other; real ranks: tests/distributed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse2d.config import Replicas
from sparse2d.mesh import Mesh
from sparse2d.parallel.startup import Holding, digest, local_holding, start_faults
from sparse2d.plan import DATA_PARALLEL, SCHEMA, Layout, Plan, PlannedShard, PlannedTable

SHAPES = {"t_a": (10, 8), "t_b": (4, 8), "t_c": (3, 4)}
MESH = Mesh(4, 2, Replicas.intra_host)
GROUP = [
    PlannedTable("t_a", 10, 8, "row_wise", [PlannedShard(0, (0, 5), (0, 8)), PlannedShard(1, (5, 10), (0, 8))]),
    PlannedTable("t_b", 4, 8, "column_wise", [PlannedShard(1, (0, 4), (0, 4)), PlannedShard(1, (0, 4), (4, 8))]),
    PlannedTable("t_c", 3, 4, DATA_PARALLEL, [PlannedShard(rank, (0, 3), (0, 4)) for rank in range(2)]),
]
PLAN = Plan(SCHEMA, Layout("sparse_2d", 4, 2, 2, "intra_host", 2, "cpu"), {}, GROUP)


def as_planned() -> list[Holding]:
    """Groups [0, 2] and [1, 3]; the bits of a shard depend on its place alone."""
    holdings = []
    for rank in range(4):
        places = [(table.name, shard.rows, shard.columns) for table, shard in PLAN.shards_of(rank // 2)]
        holdings.append(Holding([(place, str(place)) for place in places], {"over.weight": "w", "over.bias": "b"}))
    return holdings


def faults(holdings, plan=PLAN, shapes=SHAPES) -> list[str]:
    return list(start_faults(holdings, plan, MESH, shapes))


def test_ranks_that_hold_what_is_planned_may_start():
    assert faults(as_planned()) == []


@given(st.integers(0, 3), st.data())
def test_lost_doubled_and_changed_shards_are_named_with_their_rank(rank, data):
    holdings = as_planned()
    place, bits = lost = data.draw(st.sampled_from(holdings[rank].shards))
    where = f"rows {place[1][0]} to {place[1][1]} of columns {place[2][0]} to {place[2][1]} of table {place[0]}"
    others = [shard for shard in holdings[rank].shards if shard != lost]

    holdings[rank] = replace(holdings[rank], shards=others)
    told = faults(holdings)
    assert f"rank {rank} lacks {where}" in told
    assert any(f"table {place[0]} in group {rank % 2}" in fault and "are on no rank" in fault for fault in told)

    holdings[rank] = replace(holdings[rank], shards=[*others, lost, lost])
    told = faults(holdings)
    assert f"rank {rank} holds a shard of table {place[0]} twice" in told
    assert any(f"table {place[0]} in group {rank % 2}" in fault and "are on 2 shards" in fault for fault in told)

    holdings[rank] = replace(holdings[rank], shards=[*others, (place, f"{bits}, one bit off")])
    (told,) = faults(holdings)
    holders = range(4) if place[0] == "t_c" else [rank % 2 + rank // 2 * 2, (rank + 1) % 2 + rank // 2 * 2]
    assert told.startswith(f"table {place[0]}, rows {place[1]}, columns {place[2]}, differs between ranks ")
    assert f"[{rank}]" in told
    assert all(str(other) in told for other in holders)


def test_shards_beyond_the_plan_are_named():
    holdings = as_planned()
    holdings[3] = replace(holdings[3], shards=[*holdings[3].shards, (("t_a", (0, 5), (0, 8)), "x")])
    assert "rank 3 holds, unplanned, rows 0 to 5 of columns 0 to 8 of table t_a" in faults(holdings)


def test_dense_parameters_must_be_equal():
    holdings = as_planned()
    holdings[2] = replace(holdings[2], dense={"over.weight": "w", "over.bias": "c"})
    assert faults(holdings) == ["parameter over.bias differs between ranks [0, 1, 3] and [2]"]


def test_tables_planned_twice_or_never_are_named():
    plan = replace(PLAN, tables=[*GROUP, GROUP[1]])
    assert "table t_b is planned 2 times" in faults(as_planned(), plan)
    assert "table t_d is not planned" in faults(as_planned(), shapes=SHAPES | {"t_d": (1, 4)})
    assert "table t_a is planned, and the model has none" in faults(as_planned(), shapes={"t_b": (4, 8), "t_c": (3, 4)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_digests_see_every_bit_and_its_place(dtype):
    values = torch.arange(12).reshape(3, 4).to(dtype)
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(values.flip(0))
    assert digest(values) != digest(values.flip(1))
    # Views are digested by their values.
    assert digest(values.T) == digest(values.T.contiguous())
    assert digest(torch.zeros(2, 4)) != digest(-torch.zeros(2, 4))
    assert digest(torch.zeros(0, 4)) == ""


@given(st.integers(0, 99))
def test_one_value_changes_the_digest_wherever_it_is(place):
    values = torch.ones(10, 10)
    values.view(-1)[place] += torch.finfo(torch.float32).eps
    assert digest(values) != digest(torch.ones(10, 10))


def test_dense_parameters_are_digested_by_name():
    model = nn.Linear(2, 1)
    assert local_holding(model) == Holding([], {"weight": digest(model.weight), "bias": digest(model.bias)})
