"""Recorded runs as the model's inputs: what is compared, what is fitted, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from configs import tiny_train

from sparse2d.config import EngineKind, ParallelismKind, ShardingKind, SyncRows
from sparse2d.cost.planned import counted_distinct
from sparse2d.cost.recorded import steps_finding
from sparse2d.cost.runs import Run, find_runs
from sparse2d.cost.shaped import fit_points, fits, repeated, step_rows
from sparse2d.cost.validate_runs import bytes_row
from sparse2d.errors import UserError
from sparse2d.records import plain

PLANTED = 0.01
TESTBED = {"config": {"hosts": 2, "ranks_per_host": 2, "inter_host_mbit": 100.0}, "inter_host": {"mbit": 90.0}}


def config_of(folder, num_groups=1, sharding=ShardingKind.table_wise, seed=0):
    kind = ParallelismKind.full_mp if num_groups == 1 else ParallelismKind.sparse_2d
    config = tiny_train(folder, kind, num_ranks=4, num_groups=num_groups, sharding=[sharding])
    config.max_steps, config.seed = 8, seed
    return config


def recorded(config, step_ms: float) -> Run:
    qps = 1e3 * config.global_batch_size / step_ms
    record = {"fingerprint": f"{config.seed}", "provenance": "shaped", "testbed": TESTBED, "train": {"qps": qps}}
    return Run(record, config)


def modelled(config, options) -> float:
    return 1e3 * recorded(config, 1.0).predicted(options).step.total


@pytest.fixture(scope="module")
def options(simulate_config):
    return simulate_config("constants=assumed", "hardware=cpu_testbed")


def test_one_constant_is_found_on_full_mp_for_each_workload_and_2d_follows(tmp_path, options):
    planted = {
        kind: replace(options, constants=replace(options.constants, dense_efficiency=efficiency))
        for kind, efficiency in {ShardingKind.table_wise: PLANTED, ShardingKind.row_wise: 2 * PLANTED}.items()
    }
    configs = [config_of(tmp_path, groups, kind) for kind in planted for groups in (1, 2)]
    runs = [recorded(c, modelled(c, planted[c.parallelism.sharding[0]])) for c in configs]
    # A repetition, whose mean with the first one is as the model has it.
    again = recorded(config_of(tmp_path, 2, seed=1), 1.2 * runs[1].step_ms)
    runs[1] = recorded(configs[1], 0.8 * runs[1].step_ms)
    layouts = repeated([*runs, again])
    assert [len(layout.runs) for layout in layouts] == [1, 2, 1, 1]
    assert [layout.is_full for layout in fit_points(layouts)] == [True, True]
    rows = step_rows(layouts, fits(layouts, options))
    assert [row["role"] for row in rows] == ["fit", "prediction"] * 2
    assert [row["dense_efficiency"] for row in rows] == pytest.approx(
        [PLANTED, PLANTED, 2 * PLANTED, 2 * PLANTED], rel=1e-3
    )
    assert [row["error_pct"] for row in rows] == pytest.approx([0] * 4, abs=0.1)
    assert rows[1]["n_seeds"] == 2
    assert rows[1]["step_ms_std"] > 0
    assert rows[1]["trivial_error_pct"] == pytest.approx(100 * (rows[0]["step_ms"] / rows[1]["step_ms"] - 1))
    assert steps_finding(rows).endswith("2 within 20 %")


def test_links_are_those_that_the_testbed_measured(tmp_path, options):
    hardware = recorded(config_of(tmp_path), 1.0).hardware(options.hardware)
    assert (hardware.gpus_per_host, hardware.gpus_per_nic) == (2, 2)
    assert hardware.nic_gb_per_s == pytest.approx(90e6 / 8 / 1e9)
    # Half as many ranks as the reference has share the same cores.
    assert hardware.peak_tflops == pytest.approx(2 * options.hardware.peak_tflops)


def test_errors_of_bytes_are_against_what_was_measured(tmp_path, options):
    config = config_of(tmp_path, num_groups=2)
    config.sync.rows = SyncRows.all
    run = recorded(config, 1.0)
    sent = run.predicted(options).sent
    halved = {"mean": sent.lookup.mean() / 2, "max": sent.lookup.max()}
    exact = {"mean": sent.averaging.mean(), "max": sent.averaging.max()}
    dense = {"mean": sent.dense, "max": sent.dense}
    comms = {"lookup_bytes_per_step": halved, "sync_bytes_per_sync": exact, "dense_bytes_per_step": dense}
    row = bytes_row(Run(run.record | {"comms": comms}, config), options)
    assert row["lookup_bytes_error_pct"] == pytest.approx(100)
    assert row["lookup_bytes_max_error_pct"] == pytest.approx(0)
    assert row["sync_bytes_error_pct"] == pytest.approx(0)


def test_distinct_rows_are_those_of_samples_drawn_without_putting_back(tmp_path):
    run = recorded(config_of(tmp_path), 1.0)
    counts = run.counts
    assert [table.sum() for table in counts] == [8 * 60] * 26
    placement = run_placement(run)
    random, share = np.random.default_rng(0), 0.25
    draws = [np.repeat(np.arange(len(table)), table) for table in counts]
    found = np.mean(
        [
            [len(np.unique(random.choice(draws[t], int(share * len(draws[t])), replace=False))) for t in range(26)]
            for _ in range(200)
        ],
        axis=0,
    )
    expected = counted_distinct(placement, counts, np.full(26, share * 480))
    assert expected == pytest.approx(found[placement.table], rel=0.03)


def run_placement(run):
    from sparse2d.cost.placement import Cluster
    from sparse2d.cost.planned import from_plan

    return from_plan(run.workload, run.plan, Cluster(4, 2, 1e12, 0.0))


def test_only_runs_that_the_model_knows_are_taken(tmp_path):
    def write(name, trained, **changed):
        record = {"status": "completed", "config": plain(trained), "train": {"device": "cpu", "qps": 1.0}} | changed
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(record))

    write("good", config_of(tmp_path))
    write("failed", config_of(tmp_path), status="failed")
    write("gpu", config_of(tmp_path), train={"device": "cuda"})
    emulated = config_of(tmp_path)
    emulated.engine = EngineKind.emulated
    write("emulated", emulated)
    assert [run.config for run in find_runs([str(tmp_path)])] == [config_of(tmp_path)]
    with pytest.raises(UserError, match="among 1 records"):
        find_runs([str(tmp_path / "failed")])
    write("other", config_of(tmp_path), config={"no": "option"})
    with pytest.raises(UserError, match=r"other/record.json: no record of this version's sparse2d.train \(Key 'no'"):
        find_runs([str(tmp_path)])
    for content in ("[1]", "{", '{"status": "completed", "config": {}}'):
        (tmp_path / "other" / "record.json").write_text(content)
        with pytest.raises(UserError, match="no record of this version"):
            find_runs([str(tmp_path)])
