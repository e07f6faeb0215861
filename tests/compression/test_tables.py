"""Tables of compression from records written by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
from configs import tiny_train

from sparse2d.config import (
    CompressionConfig,
    DenseCompressionConfig,
    DenseMethod,
    LookupCompressionConfig,
    LookupMethod,
)
from sparse2d.records import fingerprint, plain
from sparse2d.report.dense_compression import BOTH, CompressionStudy


def record(folder: Path, experiment: str, seed: int, compression: CompressionConfig, ne: float, sent: float, qps=100.0):
    config = dataclasses.replace(tiny_train(Path("results")), experiment=experiment, seed=seed, compression=compression)
    name = fingerprint(config, "d" * 64)
    content = {
        "status": "completed",
        "provenance": "measured",
        "fingerprint": name,
        "config": plain(config),
        "data": {"name": "tiny", "digest": "d" * 64, "base_rate": 0.25},
        "eval": {"ne": ne, "auc": 0.7},
        "train": {"rows": 1200, "qps": qps},
        "comms": {
            "dense_bytes_per_step": {"mean": sent, "max": sent},
            "dense_bytes_p50": {"mean": sent / 2 if compression.is_on else sent},
            "lookup_bytes_per_step": {"mean": 3 * sent},
        },
    }
    path = folder / "runs" / experiment / name
    path.mkdir(parents=True)
    (path / "record.json").write_text(json.dumps(content))


def dct(**options) -> CompressionConfig:
    return CompressionConfig(dense=DenseCompressionConfig(method=DenseMethod.dct, **options))


def test_gaps_and_bytes_are_to_the_run_without_compression_of_the_same_seed(tmp_path):
    for seed, ne in ((0, 0.8), (1, 0.9)):
        record(tmp_path, "density", seed, CompressionConfig(), ne, 1000.0)
        record(tmp_path, "density", seed, dct(density=0.1), ne * 1.01, 100.0)
        # The other experiment has no reference of its own.
        record(tmp_path, "lifetime", seed, dct(density=0.1, lifetime=7), ne * 1.02, 50.0)
    table = CompressionStudy("density", "", ("density", "lifetime")).build(tmp_path).set_index("lifetime")
    assert table.loc[1000, ["ne_gap_pct", "bytes_ratio", "steady_bytes_ratio"]].tolist() == pytest.approx([1, 10, 20])
    assert table.loc[7, ["ne_gap_pct", "bytes_ratio", "n_seeds"]].tolist() == pytest.approx([2, 20, 2])
    plain_row = table[table["method"] == "none"].iloc[0]
    assert plain_row[["ne_gap_pct", "bytes_ratio"]].tolist() == pytest.approx([0, 1])
    # Of a method that reads no density none is shown.
    assert plain_row.isna()["density"]


def test_rows_are_kept_by_a_query_after_gaps_are_known(tmp_path):
    record(tmp_path, "density", 0, CompressionConfig(), 0.8, 1000.0)
    record(tmp_path, "density", 0, dct(density=0.1), 0.88, 100.0)
    table = CompressionStudy("density", "", ("density",), where="density == 0.1").build(tmp_path)
    assert table["ne_gap_pct"].tolist() == pytest.approx([10])


def test_compression_of_either_half_is_no_reference(tmp_path):
    lookup = LookupCompressionConfig(method=LookupMethod.dct, density=0.2)
    for compression, ne, qps in (
        (CompressionConfig(), 0.8, 100.0),
        (CompressionConfig(lookup=lookup), 0.82, 200.0),
        (dataclasses.replace(dct(density=0.1), lookup=lookup), 0.84, 300.0),
    ):
        record(tmp_path, "both", 0, compression, ne, 10.0, qps)
    table = CompressionStudy("both", "", ("both",), options=BOTH).build(tmp_path)
    assert table["qps_ratio"].tolist() == pytest.approx([3, 2, 1])
    assert table["ne_gap_pct"].tolist() == pytest.approx([5, 2.5, 0])
