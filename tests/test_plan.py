"""Plans as data: what covers a table, which file is of this run, and the file itself."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse2d.errors import UserError
from sparse2d.plan import (
    SCHEMA,
    Layout,
    Plan,
    PlannedShard,
    PlannedTable,
    cover_fault,
    read_plan,
    refuse_stale,
    write_plan,
)

LAYOUT = Layout(
    "sparse_2d", world_size=4, num_groups=2, group_size=2, replicas="intra_host", ranks_per_host=2, device="cpu"
)
TABLES = {"t_a": (10, 8), "t_b": (5, 8)}
ROW_WISE = PlannedTable("t_a", 10, 8, "row_wise", [PlannedShard(0, (0, 5), (0, 8)), PlannedShard(1, (5, 10), (0, 8))])
TABLE_WISE = PlannedTable("t_b", 5, 8, "table_wise", [PlannedShard(1, (0, 5), (0, 8))])
PLAN = Plan(SCHEMA, LAYOUT, {"torch": "2"}, [ROW_WISE, TABLE_WISE])


@st.composite
def rectangles(draw, rows=6, dim=6):
    def span(size):
        start = draw(st.integers(-1, size))
        return start, draw(st.integers(start, size + 1))

    return [(span(rows), span(dim)) for _ in range(draw(st.integers(0, 4)))]


@st.composite
def tilings(draw):
    """A table cut into a grid, in any order."""
    rows, dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row_edges, column_edges = (
        sorted({0, size} | draw(st.sets(st.integers(1, size), max_size=3))) for size in (rows, dim)
    )
    cells = [
        ((top, bottom), (left, right)) for top, bottom in pairwise(row_edges) for left, right in pairwise(column_edges)
    ]
    return rows, dim, draw(st.permutations(cells))


@given(rectangles())
def test_cover_is_what_painting_every_value_says(held):
    painted = np.zeros((8, 8), int)
    for (top, bottom), (left, right) in held:
        painted[top + 1 : bottom + 1, left + 1 : right + 1] += 1
    whole = np.zeros((8, 8), int)
    whole[1:-1, 1:-1] = 1
    proper = all(top < bottom and left < right for (top, bottom), (left, right) in held)
    assert (cover_fault(6, 6, held) is None) == (proper and np.array_equal(painted, whole))


@given(tilings(), st.data())
def test_a_lost_or_doubled_tile_is_named(tiling, data):
    rows, dim, cells = tiling
    assert cover_fault(rows, dim, cells) is None
    cell = data.draw(st.sampled_from(cells))
    (top, _), (left, _) = cell
    without = [other for other in cells if other != cell]
    assert f"rows {top} to " in cover_fault(rows, dim, without)
    assert "on no rank" in cover_fault(rows, dim, without)
    assert f"of columns {left} to " in cover_fault(rows, dim, [*cells, cell])
    assert "are on 2 shards" in cover_fault(rows, dim, [*cells, cell])


names = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.integers(-(2**40), 2**40)
spans = st.tuples(numbers, numbers)
plans = st.builds(
    Plan,
    st.just(SCHEMA),
    st.builds(Layout, names, numbers, numbers, numbers, names, numbers, names),
    st.dictionaries(names, st.none() | names, max_size=2),
    st.lists(
        st.builds(
            PlannedTable,
            names,
            numbers,
            numbers,
            names,
            st.lists(st.builds(PlannedShard, numbers, spans, spans), max_size=3),
        ),
        max_size=3,
    ),
)


@given(plans)
def test_a_plan_is_read_as_it_was_written(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plans" / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert read_plan(path).digest == plan.digest
    assert len(path.read_text().splitlines()) == 7 + max(1, len(plan.tables))
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


def test_only_what_decides_the_placement_is_in_the_digest(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(replace(PLAN, versions={}), path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert read_plan(path).digest == PLAN.digest
    assert replace(PLAN, layout=replace(LAYOUT, device="cuda")).digest != PLAN.digest
    assert replace(PLAN, tables=[ROW_WISE]).digest != PLAN.digest


@given(st.data())
def test_damaged_files_are_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    write_plan(PLAN, path)
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(UserError, match=r"^parallelism\.plan_file=.*damaged\.json: the file: Invalid JSON: ") as raised:
        read_plan(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UserError, match=r"plan_file=.*none\.json: No such file or directory"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.update(schema=2), "schema: Input should be 1"),
        (lambda plan: plan.pop("layout"), "layout: Field required"),
        (lambda plan: plan["layout"].update(num_groups="2"), "layout.num_groups: Input should be a valid integer"),
        (lambda plan: plan["layout"].update(hosts=1), "layout.hosts: Unexpected keyword argument"),
        (lambda plan: plan["tables"][0].update(rows=10.5), "tables.0.rows: Input should be a valid integer"),
        (lambda plan: plan["tables"][0].update(shards=None), "tables.0.shards: Input should be a valid array"),
        (lambda plan: plan["tables"][1]["shards"][0].update(rank=True), "tables.1.shards.0.rank: Input should be a"),
        (lambda plan: plan["tables"][1]["shards"][0].update(rows=[0]), "tables.1.shards.0.rows.1: Field required"),
    ],
)
def test_fields_that_are_not_as_declared_are_named(change, message, tmp_path):
    path = tmp_path / "plan.json"
    write_plan(PLAN, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as raised:
        read_plan(path)
    assert "\n" not in str(raised.value)


def with_shards(table: PlannedTable, *shards: PlannedShard) -> Plan:
    return replace(PLAN, tables=[replace(table, shards=list(shards)), TABLE_WISE])


FIRST, SECOND = ROW_WISE.shards


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, layout=replace(LAYOUT, world_size=8)), "made for world_size=8, this run has world_size=4"),
        (replace(PLAN, layout=replace(LAYOUT, num_groups=1)), "made for num_groups=1, this run has num_groups=2"),
        (replace(PLAN, layout=replace(LAYOUT, group_size=4)), "made for group_size=4, this run has group_size=2"),
        (replace(PLAN, layout=replace(LAYOUT, replicas="inter_host")), "made for replicas=inter_host, this run"),
        (replace(PLAN, layout=replace(LAYOUT, ranks_per_host=1)), "made for ranks_per_host=1, this run"),
        (replace(PLAN, layout=replace(LAYOUT, device="cuda")), "made for device=cuda, this run has device=cpu"),
        (replace(PLAN, layout=replace(LAYOUT, parallelism="full_mp")), "made for parallelism=full_mp, this run"),
        (replace(PLAN, tables=[ROW_WISE]), "table t_b is missing"),
        (replace(PLAN, tables=[*PLAN.tables, replace(TABLE_WISE, name="t_c")]), "table t_c is none of this run's"),
        (replace(PLAN, tables=[*PLAN.tables, TABLE_WISE]), "table t_b is planned 2 times"),
        (replace(PLAN, tables=[replace(ROW_WISE, rows=11), TABLE_WISE]), "t_a has 11 x 8 values there, 10 x 8 in this"),
        (replace(PLAN, tables=[replace(ROW_WISE, dim=4), TABLE_WISE]), "t_a has 10 x 4 values there, 10 x 8 in this"),
        (with_shards(ROW_WISE, FIRST), "t_a: rows 5 to 10 of columns 0 to 8 are on no rank"),
        (
            with_shards(ROW_WISE, FIRST, replace(SECOND, rows=(4, 10))),
            "t_a: rows 4 to 5 of columns 0 to 8 are on 2 shards",
        ),
        (
            with_shards(ROW_WISE, FIRST, replace(SECOND, columns=(0, 4))),
            "t_a: rows 5 to 10 of columns 4 to 8 are on no",
        ),
        (with_shards(ROW_WISE, FIRST, replace(SECOND, rank=2)), "t_a: rank 2 is none of a group of 2"),
        (with_shards(ROW_WISE, FIRST, replace(SECOND, rank=-1)), "t_a: rank -1 is none of a group of 2"),
        (with_shards(ROW_WISE, FIRST, replace(SECOND, rows=(5, 11))), "t_a: rows 5 to 11 are not inside 0 to 10"),
        (with_shards(ROW_WISE, FIRST, SECOND, replace(SECOND, rows=(5, 5))), "t_a: rows 5 to 5 are an empty shard"),
        (
            with_shards(replace(ROW_WISE, sharding="data_parallel"), FIRST),
            "t_a: rows 5 to 10 of columns 0 to 8 are on no rank 0",
        ),
    ],
)
def test_plans_of_another_run_are_refused(plan, message, tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UserError) as raised:
        refuse_stale(plan, path, LAYOUT, TABLES)
    assert str(raised.value).startswith(f"parallelism.plan_file={path}: ")
    assert message in str(raised.value)
    assert str(raised.value).endswith("; make it anew with plan_only=true")
    assert "\n" not in str(raised.value)


def test_a_plan_of_this_run_is_taken(tmp_path):
    refuse_stale(PLAN, tmp_path, LAYOUT, TABLES)


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"plan\.json: the plan cannot be written: "):
        write_plan(PLAN, tmp_path / "file" / "plan.json")
