"""``plan_only=true``, and runs that pin the plan it wrote."""

import json
import shutil
from pathlib import Path

import pytest
from configs import tiny_data, tiny_overrides

from sparse2d.data.prepare import prepare
from sparse2d.plan import read_plan

TWO_D = ["parallelism=sparse_2d", "parallelism.num_groups=2"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    prepare(tiny_data(folder), progress=False)
    return folder


@pytest.fixture
def planned(program, tmp_path, data_dir):
    """A plan of the tiny run, and the command line of the run."""
    arguments = [*tiny_overrides(tmp_path / "results", data_dir), "tracking=none"]
    path = tmp_path / "plan.json"
    ended = program("train", *arguments, "plan_only=true", f"plan_out={path}")
    assert ended.code == 0, ended.err
    return arguments, path, ended


def test_plan_only_says_what_each_rank_holds_and_starts_nothing(program, tmp_path):
    results = tmp_path / "results"
    ended = program(
        "train", *tiny_overrides(results, tmp_path / "data"), *TWO_D, "launch.num_ranks=4", "plan_only=true"
    )
    assert ended.code == 0, ended.err
    # No data is prepared, for the sizes of the tables are known; no run is begun.
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
    (path,) = results.rglob("*.json")
    assert f"pin this plan with parallelism.plan_file={path}" in ended.log
    plan = read_plan(path)
    assert path.name == f"adhoc-{plan.digest[:16]}.json"
    assert (plan.layout.world_size, plan.layout.num_groups, plan.layout.group_size) == (4, 2, 2)
    assert [(table.name, table.rows, table.dim) for table in plan.tables] == [
        (f"t_C{number}", 39 + number, 8) for number in range(1, 27)
    ]
    assert all(f"t_C{number} " in ended.out for number in range(1, 27))
    assert "sparse_2d: 2 x 2 ranks, intra_host, 2 ranks of a group on a host, cpu" in ended.out
    assert "imbalance (fullest over mean): bytes 1." in ended.out
    assert "modelled" in ended.out
    # Weights and one value of state for each row of each shard: on two ranks, tables of 40 to 65 rows of 8 values.
    sizes = [0, 0]
    for table in plan.tables:
        for shard in table.shards:
            sizes[shard.rank] += (shard.rows[1] - shard.rows[0]) * (shard.columns[1] - shard.columns[0] + 1) * 4
    assert f"bytes {max(sizes) * 2 / sum(sizes):.3f}" in ended.out


def test_more_ranks_on_more_hosts_than_there_are_can_be_planned(program, tmp_path):
    ended = program(
        "train",
        *tiny_overrides(tmp_path, tmp_path / "data"),
        "global_batch_size=640",
        "launch.num_ranks=64",
        "parallelism.ranks_per_host=8",
        "parallelism.sharding=[table_row_wise]",
        "plan_only=true",
    )
    assert ended.code == 0, ended.err
    assert "full_mp: 1 x 64 ranks, intra_host, 8 ranks of a group on a host, cpu" in ended.out


def test_a_run_takes_the_pinned_plan_wherever_its_file_is(program, planned, tmp_path):
    arguments, path, _ = planned
    arguments.append("parallelism.sharding=[table_wise]")
    assert program("train", *arguments, "plan_only=true", f"plan_out={path}").code == 0
    content = json.loads(path.read_text())
    # Move a table: a plan that the planner would not make.
    (shard,) = content["tables"][0]["shards"]
    shard["rank"] = 1 - shard["rank"]
    path.write_text(json.dumps(content))
    first = program("train", *arguments, f"parallelism.plan_file={path}")
    assert first.code == 0, first.err
    (record_path,) = (tmp_path / "results").glob("runs/*/*/record.json")
    record = json.loads(record_path.read_text())
    rows = [0, 0]
    for table in content["tables"]:
        for shard in table["shards"]:
            rows[shard["rank"]] += shard["rows"][1] - shard["rows"][0]
    assert record["plan"]["rows_per_rank"] == rows
    copy = shutil.copy(path, tmp_path / "copy.json")
    assert "already finished" in program("train", *arguments, f"parallelism.plan_file={copy}").log
    # The same placement, planned anew, is another run: what is pinned is part of what was asked for.
    unpinned = program("train", *arguments)
    assert unpinned.code == 0
    assert "already finished" not in unpinned.log


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["launch.num_ranks=4"], "made for world_size=2, this run has world_size=4"),
        (TWO_D, "made for parallelism=full_mp, this run has parallelism=sparse_2d"),
        (["parallelism.ranks_per_host=1"], "made for ranks_per_host=2, this run has ranks_per_host=1"),
        (
            ["model.embedding_dim=16", "model.dense_arch=[16]"],
            "table t_C1 has 40 x 8 values there, 40 x 16 in this run",
        ),
        (["data.max_table_rows=50"], "table t_C12 has 51 x 8 values there, 50 x 8 in this run"),
        (["parallelism.sharding=[column_wise]"], "which parallelism.sharding and its 40 rows do not allow"),
    ],
)
def test_stale_plans_are_refused_before_ranks_start(changes, text, program, planned, tmp_path):
    arguments, path, _ = planned
    ended = program("train", *arguments, *changes, f"parallelism.plan_file={path}")
    assert ended.code == 1
    assert ended.err.startswith(f"sparse2d.train: error: parallelism.plan_file={path}: ")
    assert text in ended.err
    assert ended.err.endswith("; make it anew with plan_only=true\n")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "results" / "runs").exists()


def test_a_damaged_plan_is_refused_before_any_data_is_read(program, planned, tmp_path):
    arguments, path, _ = planned
    path.write_text(path.read_text()[:-100])
    ended = program("train", *arguments, f"data.out_dir={tmp_path / 'new'}", f"parallelism.plan_file={path}")
    assert ended.code == 1
    assert ended.err.startswith(f"sparse2d.train: error: parallelism.plan_file={path}: the file: Invalid JSON: ")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_plan_only_of_a_pinned_plan_checks_and_shows_it(program, planned, tmp_path):
    arguments, path, before = planned
    again = program(
        "train", *arguments, f"parallelism.plan_file={path}", "plan_only=true", f"plan_out={tmp_path / 'b'}"
    )
    assert again.code == 0
    assert again.out == before.out
    assert read_plan(tmp_path / "b") == read_plan(path)
