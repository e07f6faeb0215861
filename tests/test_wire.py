"""Counted bytes against the loopback interface's own counters, and against what the layout implies."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import wire_ranks
from configs import tiny_train

from sparse2d.compression.compressor import savings
from sparse2d.config import (
    DenseCompressionConfig,
    DenseMethod,
    LookupCompressionConfig,
    LookupMethod,
    OptimizerConfig,
    ParallelismKind,
    ShardingKind,
    SyncRows,
    TableOptimizer,
    TrainConfig,
)
from sparse2d.cost.recorded import worst_error_pct
from sparse2d.cost.runs import Run
from sparse2d.cost.validate_runs import bytes_row
from sparse2d.launch import run_ranks

STEPS = 8
DIM, BATCH, NUM_RANKS = 8, 60, 4
ROWS = range(40, 66)
FLOAT = 4


def own_network(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program where no other traffic is counted."""
    return subprocess.run(
        ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def collectives() -> dict[str, tuple[float, float]]:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip (util-linux, iproute2)")
    if own_network("true").returncode != 0:
        pytest.skip("this system allows no network namespace of one's own")
    done = own_network(sys.executable, wire_ranks.__file__)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_counted_bytes_are_those_of_the_interface(collectives):
    beside_seen, beside_counted = collectives.pop("beside")
    for name, (seen, counted) in collectives.items():
        assert counted == pytest.approx(seen, rel=0.02), name
    assert beside_seen > 1e6
    assert beside_counted == 0


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, TrainConfig]:
    folder = Path(tmp_path_factory.mktemp("wire"))
    table_wise = {"num_ranks": NUM_RANKS, "sharding": [ShardingKind.table_wise]}
    configs = {
        "full_mp": tiny_train(folder, ParallelismKind.full_mp, **table_wise),
        "2d": tiny_train(folder, ParallelismKind.sparse_2d, num_groups=2, interval=4, **table_wise),
        "2d_rowwise": tiny_train(
            folder, ParallelismKind.sparse_2d, num_ranks=NUM_RANKS, num_groups=2, sharding=[ShardingKind.row_wise]
        ),
        # Each rank is a group, and the replicas' group is all ranks.
        "2d_alone": tiny_train(folder, ParallelismKind.sparse_2d, num_groups=NUM_RANKS, **table_wise),
        "data_parallel": tiny_train(folder, ParallelismKind.data_parallel, num_ranks=NUM_RANKS),
    }
    configs["2d"].sync.rows = SyncRows.all
    configs["2d"].optimizer = OptimizerConfig(name=TableOptimizer.rowwise_adagrad)
    for layout, groups in {"full_mp": 1, "sparse_2d": 2}.items():
        configs[f"{layout}_columns_and_rows"] = tiny_train(
            folder,
            ParallelismKind[layout],
            num_ranks=NUM_RANKS,
            num_groups=groups,
            sharding=[ShardingKind.column_wise] if groups > 1 else [ShardingKind.row_wise],
            optimizer=TableOptimizer.rowwise_adagrad,
            interval=groups,
        )
    configs["sparse_2d_columns_and_rows"].sync.rows = SyncRows.touched
    for config in configs.values():
        config.max_steps = STEPS
    return configs


@pytest.fixture(scope="module")
def trainings(configs, tiny_dataset) -> dict[str, dict]:
    lookup = LookupCompressionConfig(method=LookupMethod.dct, density=0.05)
    dense = DenseCompressionConfig(method=DenseMethod.dct, density=0.05)
    compression = replace(configs["full_mp"].compression, lookup=lookup, dense=dense)
    compressed = configs | {"dct": replace(configs["full_mp"], compression=compression)}
    return run_ranks(wire_ranks.count_trainings, compressed, tiny_dataset, STEPS, num_ranks=NUM_RANKS)


LAYOUTS = ["full_mp", "2d", "2d_rowwise", "full_mp_columns_and_rows", "sparse_2d_columns_and_rows"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cost_model_knows_the_bytes_from_the_plan_and_the_data(layout, configs, trainings, simulate_config):
    record = {"provenance": "measured", "fingerprint": "", "comms": trainings[layout]}
    row = bytes_row(Run(record, configs[layout]), simulate_config("constants=assumed"))
    assert row["lookup_bytes"] > 0
    assert (row["sync_bytes"] > 0) == (configs[layout].parallelism.num_groups > 1)
    assert worst_error_pct([row]) < 5


def of(record: dict, purpose: str, dtype: str) -> float:
    """Bytes that a rank sends a step, on average, for one purpose in one type."""
    return sum(
        kind["sent_bytes_per_step"]["mean"]
        for kind in record["collectives"]
        if (kind["purpose"], kind["dtype"]) == (purpose, dtype)
    )


@pytest.mark.parametrize(("layout", "group_size"), [("full_mp", NUM_RANKS), ("2d", NUM_RANKS // 2)])
def test_table_wise_lookups_send_pooled_embeddings_there_and_gradients_back(trainings, layout, group_size):
    # Each row of the batch needs all tables' pooled embeddings, of which 1 / N lie on its own rank.
    pooled = BATCH / NUM_RANKS * len(ROWS) * DIM * FLOAT * (1 - 1 / group_size)
    assert of(trainings[layout], "lookup", "float32") == pytest.approx(2 * pooled)
    parts = {part: of_ranks["mean"] for part, of_ranks in trainings[layout]["lookup_parts_bytes_per_step"].items()}
    assert (parts["embeddings"], parts["gradients"], parts["sizes"]) == pytest.approx((pooled, pooled, 0))
    assert sum(parts.values()) == pytest.approx(trainings[layout]["lookup_bytes_per_step"]["mean"])


def test_ids_are_counted_as_lookups(trainings):
    # One id of each table for each row; its length travels with it, as 4 bytes at most each.
    ids = BATCH / NUM_RANKS * len(ROWS) * 3 / 4
    counted = trainings["full_mp"]["lookup_bytes_per_step"]["mean"] - of(trainings["full_mp"], "lookup", "float32")
    assert 4 * ids <= counted <= (8 + 4) * ids + 1000


def test_thresholded_lookups_send_positions_and_values_there_and_values_back(trainings):
    full, dct = (trainings[name]["lookup_parts_bytes_per_step"] for name in ("full_mp", "dct"))
    assert dct["ids"] == full["ids"]
    # Two numbers of four bytes for each other rank.
    assert dct["sizes"] == {"mean": 8 * (NUM_RANKS - 1), "max": 8 * (NUM_RANKS - 1)}
    # The threshold is that of the first step, in which one entry in twenty is sent.
    values, entries = dct["gradients"]["mean"], full["gradients"]["mean"]
    assert 0.02 < values / entries < 0.1
    # Positions take at least a flag bit for eight entries, and at most a byte for each value with a tenth for flags.
    positions = dct["embeddings"]["mean"] - values
    assert entries / FLOAT / 64 < positions < values / FLOAT + 1.1 * entries / FLOAT / 64 + 8 * NUM_RANKS


def test_savings_are_told_against_what_a_run_without_compression_sends(trainings):
    full, dct = trainings["full_mp"], trainings["dct"]
    of_ranks = {
        name: {key: {"mean": value} for key, value in record.items()} for name, record in dct["compression"].items()
    }
    told = savings(dct | {"compression": of_ranks})
    times, share = re.search(r"([\d.]+) times as much\) and .* \(([\d.]+)% of the entries\)", told).groups()
    sent = [record["dense_bytes_per_step"]["mean"] for record in (full, dct)]
    assert float(times) == pytest.approx(sent[0] / sent[1], rel=0.02)
    assert 2 < float(share) < 10
    assert savings(full) is None


@pytest.mark.parametrize("layout", ["full_mp", "2d", "2d_rowwise", "2d_alone"])
def test_dense_gradients_go_around_the_ring_of_all_ranks_once_a_step(trainings, layout):
    record = trainings[layout]
    expected = 2 * (1 - 1 / NUM_RANKS) * record["dense_elements"] * FLOAT
    assert of(record, "dense", "float32") == pytest.approx(expected)
    assert record["dense_bytes_per_step"]["max"] == pytest.approx(expected, rel=0.01)


def test_averaging_all_rows_sends_every_row_and_moment_once_each_time(trainings):
    # A ring of M = 2 over N = 2 ranks' shares of all rows, each of DIM weights and one moment.
    elements = sum(ROWS) * (DIM + 1)
    expected = 2 * (1 - 1 / 2) * elements / 2 * FLOAT
    assert trainings["2d"]["sync_bytes_per_sync"]["mean"] == pytest.approx(expected)
    assert trainings["full_mp"]["sync_bytes_per_sync"] == {"mean": 0, "max": 0}


def test_data_parallel_tables_are_all_reduced_and_nothing_is_looked_up_elsewhere(trainings):
    record = trainings["data_parallel"]
    assert record["lookup_bytes_per_step"] == {"mean": 0, "max": 0}
    elements = record["dense_elements"] + sum(ROWS) * DIM
    assert record["dense_bytes_per_step"]["mean"] == pytest.approx(2 * (1 - 1 / NUM_RANKS) * elements * FLOAT, rel=0.01)
