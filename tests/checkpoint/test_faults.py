"""Whole runs that are killed, told to end, and started again."""

import json
import shutil
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest
from checkpoint_kills import STEPS_PER_KILL, differences, killed_and_undisturbed, only_run, points
from configs import tiny_data, tiny_overrides
from programs import PATIENCE_S, started, wait_until

from sparse2d.checkpoint.folder import checkpoints_in
from sparse2d.data.prepare import prepare

LONG = 30_000
SHORT = ["max_steps=60", "tracking=none"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    prepare(tiny_data(folder, LONG), progress=False)
    return folder


def record(run_dir: Path) -> dict:
    return json.loads((run_dir / "record.json").read_text())


def saved(results: Path) -> list[Path]:
    return [path for folder in results.glob("runs/*/*/checkpoints") for path in checkpoints_in(folder)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ranks_change_nothing(tmp_path):
    undisturbed, killed, moments = killed_and_undisturbed(tmp_path, kills=3, seed=1)
    assert len(moments) == 3
    assert sum("in a save" in moment for moment in moments) >= 1, moments
    assert differences(undisturbed, killed) == []
    assert record(killed)["status"] == "completed"
    log = (killed / "run.log").read_text()
    assert log.count("resumed from ") >= 2
    # A finished run keeps its last checkpoint.
    assert [path.name for path in checkpoints_in(killed / "checkpoints")] == [f"step-{3 * STEPS_PER_KILL:08d}"]


@pytest.mark.slow
def test_sigterm_saves_and_the_next_start_goes_on(tmp_path, data_dir, program):
    arguments = [
        *tiny_overrides(tmp_path, data_dir, LONG),
        "checkpoint.interval=1000",
        "max_steps=200",
        "tracking=none",
    ]
    with started(*arguments) as process:
        wait_until(
            lambda: tmp_path.exists() and any(points(path.parent) for path in tmp_path.rglob("metrics.jsonl")), process
        )
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert err.splitlines()[-1] == "sparse2d.train: terminated"
    assert "Traceback" not in err
    run_dir = only_run(tmp_path)
    (checkpoint,) = saved(tmp_path)
    step = int(checkpoint.name.removeprefix("step-"))
    assert record(run_dir)["status"] == "interrupted"
    assert record(run_dir)["error"] == f"stopped after step {step} of 200; the same command goes on from there"
    before = points(run_dir)
    assert program("train", *arguments).code == 0
    assert f"resumed from {checkpoint} (step {step})" in (run_dir / "run.log").read_text()
    assert record(run_dir)["train"]["resumed_step"] == step
    assert points(run_dir)[: len(before)] == before
    assert [point["step"] for point in points(run_dir)] == [*range(5, 201, 5), 200]


@pytest.mark.slow
def test_torchrun_goes_on_from_the_last_checkpoint(tmp_path, data_dir, program):
    """The rank that was killed is named meanwhile; and a damaged checkpoint is passed over, by name."""
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m sparse2d.train"
    overrides = [text for text in tiny_overrides(tmp_path, data_dir, LONG) if "num_ranks" not in text]
    with started(*overrides, *SHORT, "checkpoint.interval=10", "checkpoint.keep=3", module=launcher) as process:
        wait_until(lambda: len(saved(tmp_path)) >= 2, process)
        (victim, *_) = (child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1")
        victim.kill()
        run_dir = only_run(tmp_path)
        wait_until((run_dir / "record.json").exists, process)
        failed = record(run_dir)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert (failed["status"], failed["error"]) == ("failed", "rank 1: killed, it left no word")
    assert record(run_dir)["status"] == "completed"
    assert record(run_dir)["train"]["resumed_step"] >= 20
    assert [point["step"] for point in points(run_dir)] == [*range(5, 61, 5), 60]
    (last,) = saved(tmp_path)
    # The record is gone, as if the run had been stopped, and a byte of the only checkpoint is another one.
    (run_dir / "record.json").unlink()
    content = bytearray((last / "__1_0.distcp").read_bytes())
    content[-100] ^= 1
    (last / "__1_0.distcp").write_bytes(content)
    shutil.copytree(last, last.with_name("step-00000070.partial"))
    (run_dir / "run.log").unlink()
    assert program("train", *tiny_overrides(tmp_path, data_dir, LONG), *SHORT, "checkpoint.interval=10").code == 0
    log = (run_dir / "run.log").read_text()
    assert f"checkpoint skipped: {last / '__1_0.distcp'} is damaged" in log
    assert "step-00000070.partial: skipped and removed, its writing was cut off" in log
    assert "resumed from" not in log


@pytest.mark.slow
def test_torchrun_records_that_rank_0_was_killed(tmp_path, data_dir):
    """Rank 0 writes records; where it is gone, another one does."""
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m sparse2d.train"
    overrides = [text for text in tiny_overrides(tmp_path, data_dir, LONG) if "num_ranks" not in text]
    with started(*overrides, "tracking=none", module=launcher) as process:
        wait_until(lambda: any(points(path.parent) for path in tmp_path.rglob("metrics.jsonl")), process)
        children = psutil.Process(process.pid).children()
        next(child for child in children if child.environ().get("RANK") == "0").kill()
        killed_at = time.monotonic()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert time.monotonic() - killed_at < PATIENCE_S / 2
    failed = record(only_run(tmp_path))
    assert (failed["status"], failed["error"]) == ("failed", "rank 0: killed, it left no word")


def test_an_error_of_the_users_is_not_tried_again(tmp_path, data_dir, program):
    options = ["optimizer=sgd", "optimizer.lr=1e38", "checkpoint.interval=1", "launch.max_restarts=3"]
    ended = program("train", *tiny_overrides(tmp_path, data_dir, LONG), *options, *SHORT)
    assert ended.code == 1
    assert ended.err.startswith("sparse2d.train: error: the loss is not finite at step 2 on rank ")
    assert (only_run(tmp_path) / "run.log").read_text().count("ready after") == 1
    # Nothing goes on from weights that are no numbers.
    assert [path.name for path in saved(tmp_path)] == ["step-00000001"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(tmp_path, data_dir, program):
    def put_a_file_in_the_way() -> None:
        while not saved(tmp_path):
            time.sleep(0.01)
        folder = saved(tmp_path)[0].parent
        while folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("in the way")

    Thread(target=put_a_file_in_the_way, daemon=True).start()
    ended = program("train", *tiny_overrides(tmp_path, data_dir, LONG), "checkpoint.interval=20", "tracking=none")
    assert ended.code == 1
    assert "cannot write the checkpoint of step " in ended.err
    assert len(ended.err.splitlines()) == 1
