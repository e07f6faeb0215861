"""Fingerprints, and the files of a run's folder."""

import dataclasses
import json
import math
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import tiny_train
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sparse2d.config import TrainConfig
from sparse2d.errors import UserError
from sparse2d.records import (
    MetricsFile,
    RunDirectory,
    fingerprint,
    forget_peak_rss,
    peak_rss_bytes,
    plain,
    seeds_group,
    write_atomically,
)

DIGEST = "0" * 64
# The data's digest stands for its source and for how it was read.
SOURCE = {"data.path", "data.raw_dir", "data.days", "data.workers", "data.on_bad_line", "data.max_rejects"}
# And the plan's for the path of its file.
PLAN = {"plan_only", "plan_out", "parallelism.plan_file"}
IGNORED = (
    {"results_dir", "rerun", "fail_fast", "data.out_dir", "data.vocabulary", "launch.max_restarts"} | SOURCE | PLAN
)
# It decides global_batch_size, and nothing else.
IGNORED |= {"rank_batch_size"}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, owner and field name of every option."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", config, field.name


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, *value[-1:]]
    if isinstance(value, str):
        return f"{value}x"
    return 7 if value is None else value + 1


def test_every_option_but_where_and_how_it_is_watched_changes_the_fingerprint(train_config):
    config = train_config()
    before = fingerprint(config, DIGEST)
    unchanged = set()
    for name, owner, field in leaves(config):
        value = getattr(owner, field)
        setattr(owner, field, other(value))
        if fingerprint(config, DIGEST) == before:
            unchanged.add(name)
        setattr(owner, field, value)
    ours = {name for name, _, _ in leaves(config) if name.startswith(("tracking.", "checkpoint."))}
    assert unchanged == (IGNORED | ours) - {"checkpoint.resume"}
    assert fingerprint(config, DIGEST) == before
    assert fingerprint(config, "1" * 64) != before
    assert fingerprint(config, DIGEST, plan_digest=DIGEST) != before


@given(st.text("0123456789abcdef", min_size=64, max_size=64))
def test_the_datas_digest_changes_the_fingerprint(digest):
    config = tiny_train(Path("results"))
    assert (fingerprint(config, digest) == fingerprint(config, DIGEST)) == (digest == DIGEST)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.lr=1e-5", "optimizer.eps=3e-12", "optimizer.dense.lr=12345678.9"],
        ["optimizer=momentum_scaled_rowwise_adagrad", "parallelism=sparse_2d", "data=criteo_kaggle", "max_steps=5"],
        ["optimizer=momentum_scaled_rowwise_adagrad", "optimizer.moment_scale=4", "experiment=ne_parity"],
        ["data=criteo_kaggle", "data.path='on: off #1'", "tracking.entity='null'", "data.name=1e5"],
    ],
)
def test_config_file_gives_the_config_back(overrides, tmp_path, train_config):
    config = train_config(f"results_dir={tmp_path}", *overrides)
    run = RunDirectory(config, DIGEST)
    run.begin()
    loaded = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(run.path / "config.yaml"))
    again = OmegaConf.to_object(loaded)
    assert again == config
    assert fingerprint(again, DIGEST) == run.fingerprint
    assert plain(again) == plain(config)


def test_a_run_has_its_own_folder_and_no_record_until_it_ends(tmp_path):
    config = tiny_train(tmp_path)
    run = RunDirectory(config, DIGEST)
    assert run.path == tmp_path / "runs" / "test" / fingerprint(config, DIGEST)
    run.begin()
    assert {path.name for path in run.path.iterdir()} - {".lock"} == {"config.yaml"}
    assert run.completed_record() is None
    written = run.finish("completed", None, {"eval": {"ne": 0.9, "auc": None}})
    assert run.completed_record() == written == json.loads((run.path / "record.json").read_text())
    assert sorted(path.name for path in run.path.iterdir() if path.name != ".lock") == ["config.yaml", "record.json"]


def test_checkpoints_and_what_goes_with_them_stay_unless_the_run_starts_anew(tmp_path):
    def begun(is_restart: bool = False, **options) -> set[str]:
        config = tiny_train(tmp_path, save_every=2)
        config.rerun = options.pop("rerun", False)
        for name, value in options.items():
            setattr(config.checkpoint, name, value)
        run = RunDirectory(config, DIGEST)
        for name in ("record.json", "metrics.jsonl", "run.log", "checkpoints/step-00000002/manifest.json"):
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).touch()
        run.begin(is_restart)
        left = {path.name for path in run.path.iterdir()} - {".lock", "config.yaml"}
        run.finish("failed", "why", {})
        return left

    goes_on = {"metrics.jsonl", "run.log", "checkpoints"}
    assert begun() == goes_on
    assert begun(resume="never") == set()
    assert begun(rerun=True) == set()
    # The launcher has started the ranks again: what this very run has saved is not thrown away.
    assert begun(is_restart=True, resume="never") == begun(is_restart=True, rerun=True) == goes_on
    assert begun(interval=None) == {"checkpoints"}


def test_a_folder_that_cannot_be_written_stays_unlocked(tmp_path):
    run = RunDirectory(tiny_train(tmp_path), DIGEST)
    (run.path / "config.yaml").mkdir(parents=True)
    with pytest.raises(UserError, match="must be writable"):
        run.begin()
    (run.path / "config.yaml").rmdir()
    RunDirectory(tiny_train(tmp_path), DIGEST).begin()


def test_points_of_undone_steps_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "rows": step}) + "\n" for step in (5, 10, 15)]
    path.write_text("".join(lines) + json.dumps({"step": 10, "eval/ne": 1}) + "\n" + '{"step": 1')
    MetricsFile(path, done_steps=10).close()
    assert path.read_text() == "".join(lines[:2])
    MetricsFile(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_only_completed_runs_are_finished(status, tmp_path):
    run = RunDirectory(tiny_train(tmp_path), DIGEST)
    run.begin()
    run.finish(status, "why", {})
    assert run.completed_record() is None


def test_a_cut_off_record_is_no_record(tmp_path):
    run = RunDirectory(tiny_train(tmp_path), DIGEST)
    run.begin()
    run.finish("completed", None, {})
    path = run.path / "record.json"
    path.write_text(path.read_text()[:-8])
    assert run.completed_record() is None


def test_beginning_again_clears_what_an_earlier_attempt_left(tmp_path):
    run = RunDirectory(tiny_train(tmp_path), DIGEST)
    run.begin()
    run.finish("completed", None, {})
    for name in ("metrics.jsonl", "run.log"):
        (run.path / name).write_text("old\n")
    run.begin()
    assert {path.name for path in run.path.iterdir()} - {".lock"} == {"config.yaml"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_never_holds_nan(value, tmp_path):
    run = RunDirectory(tiny_train(tmp_path), DIGEST)
    run.begin()
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.finish("completed", None, {"eval": {"ne": value}})
    metrics = MetricsFile(run.path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write({"step": 1, "loss": value})
    metrics.write({"step": 2, "loss": None})
    metrics.close()
    assert not (run.path / "record.json").exists()
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 2, "loss": null}\n'


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        metrics.write({"step": step})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    metrics.close()


def test_readers_see_a_whole_file_at_any_time(tmp_path):
    path = tmp_path / "record.json"
    texts = [json.dumps({"value": value} | {str(i): value for i in range(5000)}) for value in range(2)]
    write_atomically(path, texts[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(200):
            write_atomically(path, texts[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert len(set(json.loads(path.read_text()).values())) == 1
    writer.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_command_can_be_typed_again(tmp_path, monkeypatch):
    program = Path("/some where/src/sparse2d/train.py")
    monkeypatch.setattr("sys.argv", [str(program), "data.path=my rows.tsv", "seed=1"])
    record = RunDirectory(tiny_train(tmp_path), DIGEST).finish("completed", None, {})
    assert record["command"].endswith("-m sparse2d.train 'data.path=my rows.tsv' seed=1")


def test_seeds_of_a_configuration_are_one_group(train_config):
    """Also where the order of the rows follows the seed, but not where it is another setting."""
    follows = [
        seeds_group(train_config(f"seed={n}", f"data.shuffle_seed={n}", "optimizer.lr=0.1"), DIGEST) for n in (0, 1)
    ]
    assert follows[0] == follows[1]
    other = [f"seed={n}" for n in (0, 1)]
    assert seeds_group(train_config(other[0]), DIGEST) == seeds_group(train_config(other[1]), DIGEST) != follows[0]
    assert seeds_group(train_config("seed=0", "data.shuffle_seed=1"), DIGEST) not in follows
    assert seeds_group(train_config("seed=0"), "1" * 64) != seeds_group(train_config("seed=0"), DIGEST)


def test_a_peak_of_memory_can_be_forgotten():
    before = peak_rss_bytes()
    block = np.ones(100_000_000)
    assert peak_rss_bytes() > before + 400_000_000
    del block
    forget_peak_rss()
    assert peak_rss_bytes() < before + 400_000_000
