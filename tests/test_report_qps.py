"""Tables of QPS from records written by hand into real files."""

import json
from pathlib import Path

import pandas as pd
import pytest
from configs import tiny_train

from sparse2d.config import ParallelismKind, ShardingKind, SyncRows, TrainConfig
from sparse2d.records import fingerprint, plain
from sparse2d.report.qps import QpsStudy

KINDS = ("full_mp", "sparse_2d")
FULL_MP, TWO_D = ParallelismKind.full_mp, ParallelismKind.sparse_2d


def config_of(kind: ParallelismKind, seed: int, num_groups: int = 1, interval: int = 1) -> TrainConfig:
    config = tiny_train(Path("results"), kind, num_ranks=4, num_groups=num_groups, sharding=[ShardingKind.table_wise])
    config.experiment, config.seed, config.sync.interval = "qps_scaling", seed, interval
    if kind is TWO_D:
        config.sync.rows = SyncRows.touched
    return config


def record(
    results: Path, config: TrainConfig, qps: float, *, mbit: float | None = 200.0, averaging_ms=(0.0, 0.0)
) -> str:
    """Write one run's record; returns its fingerprint."""
    name = fingerprint(config, f"{mbit}")
    testbed = {"config": {"hosts": 2, "ranks_per_host": 2, "inter_host_mbit": mbit}}
    links = {"inside_host": {"mean": 10.0, "max": 20.0}, "between_hosts": {"mean": 30.0, "max": 40.0}}
    content = {
        "status": "completed",
        "provenance": "measured" if mbit is None else "shaped",
        **({} if mbit is None else {"testbed": testbed}),
        "fingerprint": name,
        "config": plain(config),
        "data": {"digest": "d", "base_rate": 0.25},
        "train": {
            "qps": qps,
            "step_ms": {"p50": 1e3 / qps},
            "phases_ms": {"averaging": {"slowest": {}, "per_rank": [{"mean": ms} for ms in averaging_ms]}},
        },
        "comms": {
            "lookup_bytes_per_step": {"mean": 100.0, "max": 200.0},
            "dense_bytes_per_step": {"mean": 5.0, "max": 5.0},
            "sync_bytes_per_sync": {"mean": 80.0 if config.sync.interval > 1 else 0.0, "max": 90.0},
            **({} if mbit is None else {"link_bytes_per_step": links}),
        },
        "plan": {"bytes_per_rank": [1, 7], "imbalance": 1.5},
        "memory": {"peak_rss_bytes": 1000},
    }
    folder = results / "runs" / "qps_scaling" / name
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(content))
    return name


def test_ratios_are_to_full_mp_of_the_same_repetition_and_network(tmp_path):
    names = {}
    for seed, (full_mp, two_d) in enumerate([(100.0, 200.0), (200.0, 300.0), (50.0, 200.0)]):
        record(tmp_path, config_of(FULL_MP, seed), full_mp)
        record(tmp_path, config_of(FULL_MP, seed), 10 * full_mp, mbit=None)
        names[seed] = record(tmp_path, config_of(TWO_D, seed, 2, interval=8), two_d, averaging_ms=(seed, 2.0))
    table = QpsStudy("qps_scaling", "").build(tmp_path)
    assert table["label"].tolist() == ["measured", "shaped", "shaped"]
    full_mp, two_d = (table[(table["parallelism"] == kind) & (table["label"] == "shaped")].iloc[0] for kind in KINDS)
    assert (two_d["qps"], two_d["qps_min"], two_d["qps_max"]) == (pytest.approx(700 / 3), 200, 300)
    assert two_d["ratio_to_full_mp"] == pytest.approx((2 + 1.5 + 4) / 3)
    assert two_d["ratio_to_full_mp_std"] == pytest.approx(pd.Series([2, 1.5, 4]).std())
    assert full_mp["ratio_to_full_mp"] == 1
    assert two_d["n_seeds"] == 3
    assert set(two_d["fingerprints"].split()) == set(names.values())
    # Per step; means over ranks and repetitions.
    assert two_d["averaging_bytes"] == 10
    assert two_d["averaging_ms"] == pytest.approx((0 + 1 + 2 + 3 * 2) / 6)
    assert (two_d["group_size"], two_d["table_bytes"]) == (2, 7)
    assert (two_d["inside_host_bytes"], two_d["between_hosts_bytes"]) == (10, 30)
    # A cluster's links are nobody's but its own.
    measured = table[table["label"] == "measured"].iloc[0]
    assert pd.isna(measured["between_hosts_bytes"])
    assert measured["qps"] == pytest.approx(3500 / 3)


def test_runs_that_differ_otherwise_are_not_pooled(tmp_path):
    for dim in (8, 12):
        config = config_of(FULL_MP, 0)
        config.model.embedding_dim = dim
        record(tmp_path, config, 100.0 * dim)
    table = QpsStudy("qps_scaling", "").build(tmp_path)
    assert sorted(table["qps"]) == [800, 1200]
    assert table["settings"].nunique() == 2


def test_no_runs_no_table(tmp_path):
    assert QpsStudy("qps_scaling", "").build(tmp_path).empty
