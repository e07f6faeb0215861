"""``engine=emulated`` as a user runs it: the record says what it is, and real ranks score the same."""

import json

import pytest
from configs import tiny_overrides

ENGINES = ("emulated", "distributed")


@pytest.fixture
def record(program, tmp_path):
    """The record of one run under some overrides."""

    def run(engine: str, *overrides: str) -> dict:
        ended = program("train", *tiny_overrides(tmp_path / engine, tmp_path / "data"), f"engine={engine}", *overrides)
        assert ended.code == 0, ended.err
        (path,) = (tmp_path / engine).glob("runs/*/*/record.json")
        return json.loads(path.read_text())

    return run


def test_an_emulated_run_is_recorded_as_one_and_scores_as_its_ranks_do(record):
    layout = ["parallelism=sparse_2d", "parallelism.num_groups=2", "sync.interval=4"]
    emulated, real = (record(engine, *layout, "optimizer.eps=1e-3", "max_steps=18") for engine in ENGINES)
    assert (emulated["provenance"], real["provenance"]) == ("emulated", "measured")
    assert emulated["config"]["launch"]["num_ranks"] == real["config"]["launch"]["num_ranks"] == 2
    assert emulated["plan"] == real["plan"]
    assert emulated["comms"]["sync_payload_bytes"] == 0
    assert emulated["comms"]["sync_ms_p50"] is None
    assert emulated["comms"]["lookup_bytes_per_step"] is None
    # 18 is no multiple of 4: replicas differ, and each scores the rows of its own ranks.
    for metric in ("ne", "auc", "calibration"):
        assert emulated["eval"][metric] == pytest.approx(real["eval"][metric], abs=1e-5)
    assert emulated["eval"]["rows"] == real["eval"]["rows"] == 200


def test_more_groups_than_ranks_are_refused(program, tmp_path):
    overrides = tiny_overrides(tmp_path, tmp_path / "data")
    ended = program("train", *overrides, "engine=emulated", "parallelism=sparse_2d", "parallelism.num_groups=4")
    assert ended.code != 0
    assert "launch.num_ranks=2 is not divisible by parallelism.num_groups=4" in ended.err
