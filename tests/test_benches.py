"""What a benchmark counts is checked on a small run; its times say nothing here."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from programs import environment

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def table_of(benchmark: str, name: str, results: Path, *arguments: str) -> pd.DataFrame:
    """Run a benchmark as ``make bench-...`` does and read its table."""
    command = [sys.executable, str(EXPERIMENTS / benchmark / "bench.py"), "--results-dir", str(results), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pd.read_csv(results / "tables" / f"{name}.csv")


def test_one_averaging_of_each_kind(tmp_path):
    few = ["--sizes", "40000", "80000", "--ranks", "4", "--rounds", "1", "--track-steps", "1"]
    found = table_of("sync_cost", "sync_cost", tmp_path, *few)
    sent = found.set_index(["rows", "table_rows"])["bytes"]
    assert set(found["rows"]) == {"touched", "touched_bf16", "auto", "all", "upstream"}
    # A ring of 4 replicas: each rank sends 1.5 times its shard's 40,000 x (64 + 1) x 4 bytes.
    for way in ("all", "upstream"):
        assert sent[way, 80_000] == pytest.approx(2 * sent[way, 40_000], rel=0.05)
        assert sent[way, 40_000] == pytest.approx(1.5 * 40_000 * 65 * 4, rel=0.1)
    assert sent["touched_bf16", 80_000] < sent["touched", 80_000] < sent["all", 80_000]
