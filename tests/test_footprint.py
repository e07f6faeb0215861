"""Memory that tables take, against what the plan gives each rank, and what becomes of tables that are too large."""

from dataclasses import replace

import pytest
from configs import tiny_data, tiny_overrides, tiny_train

from sparse2d.config import Combine, EngineKind, ParallelismKind, ShardingKind, TableOptimizer
from sparse2d.data.prepare import prepare
from sparse2d.footprint import table_bytes
from sparse2d.planning import plan_here

ROWS = list(range(40, 66))


@pytest.mark.parametrize("optimizer", list(TableOptimizer))
@pytest.mark.parametrize(
    ("kind", "num_groups"),
    [(ParallelismKind.full_mp, 1), (ParallelismKind.sparse_2d, 2), (ParallelismKind.data_parallel, 1)],
)
def test_bytes_are_those_of_the_plan(kind, num_groups, optimizer, tmp_path):
    config = tiny_train(
        tmp_path, kind, num_ranks=4, num_groups=num_groups, optimizer=optimizer, sharding=[ShardingKind.row_wise]
    )
    _, summary = plan_here(config, ROWS)
    of_a_group = sum(summary.bytes_per_rank)
    assert table_bytes(config, ROWS, 4) == of_a_group * num_groups
    assert table_bytes(config, ROWS, 2) == of_a_group * num_groups // 2


def test_emulated_replicas_are_all_on_this_host_unless_they_are_always_equal(tmp_path):
    config = tiny_train(tmp_path, ParallelismKind.sparse_2d, num_ranks=4, num_groups=2)
    emulated = replace(config, engine=EngineKind.emulated)
    one_copy = sum(ROWS) * 8 * 4
    assert table_bytes(emulated, ROWS, 4) == 2 * one_copy
    emulated.sync.combine = Combine.gradient
    assert table_bytes(emulated, ROWS, 4) == one_copy


def test_tables_without_room_are_refused_before_a_run_begins(program, tmp_path, monkeypatch):
    prepare(tiny_data(tmp_path / "data"), progress=False)
    monkeypatch.setattr("sparse2d.footprint.psutil.virtual_memory", lambda: type("Memory", (), {"available": 4e4})())
    ended = program("train", *tiny_overrides(tmp_path / "results", tmp_path / "data"), "tracking=none")
    assert ended.code == 1
    needed = sum(ROWS) * (8 + 1) * 4
    told = f"tables of {sum(ROWS)} rows and their optimizer state take {needed / 1000:.3g} KB on this host, 40 KB of"
    assert ended.err.startswith(f"sparse2d.train: error: {told} memory are free; lower model.embedding_dim, ")
    assert not (tmp_path / "results" / "runs").exists()
