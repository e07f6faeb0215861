"""``launch=slurm``: what it composes, and, with submitit's executor for this machine, what becomes of its jobs."""

import json
import signal

import psutil
import pytest
from configs import tiny_overrides
from programs import PATIENCE_S, started, wait_until
from test_train import LONG, data_dir, read_record, run_dirs  # noqa: F401

pytest.importorskip(
    "hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed; make environment"
)


def test_slurm_gets_an_array_that_may_be_queued_again(composed):
    config = composed("train", "launch=slurm", "experiment=ne_parity", "launch.num_ranks=4", with_hydra=True)
    launcher = config.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher")
    assert (launcher.nodes, launcher.tasks_per_node) == (1, 1)
    assert launcher.array_parallelism > 1
    assert launcher.max_num_timeout > 0
    assert config.checkpoint.interval is not None
    assert config.launch.num_ranks == 4


def test_a_single_job_is_not_run_on_the_login_node(program, tmp_path):
    ended = program("train", "launch=slurm", f"results_dir={tmp_path}")
    assert (ended.code, ended.err) == (
        1,
        "sparse2d.train: error: launch=slurm submits the jobs of a sweep: add -m\n",
    )


def test_a_sweep_where_there_is_no_slurm_is_refused_before_any_job(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = program("train", "-m", "launch=slurm", "seed=0,1", f"results_dir={tmp_path / 'results'}")
    assert ended.code == 1
    assert ended.err.startswith("sparse2d.train: error: launch=slurm submits to Slurm, and there is no srun here: ")
    assert "job 1" not in ended.log
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_preempted_job_goes_on_from_its_newest_checkpoint_and_a_failing_one_is_told(tmp_path, data_dir):  # noqa: F811
    """The same pickled jobs, signals and requeueing as on Slurm, in processes of this machine."""
    cluster = ["hydra/launcher=submitit_local", f"hydra.launcher.submitit_folder={tmp_path}/jobs/%j"]
    options = ["checkpoint.interval=20", "max_steps=200", "global_batch_size=60,61"]
    with started("-m", *tiny_overrides(tmp_path, data_dir, LONG), *cluster, *options) as process:
        wait_until(lambda: any(tmp_path.glob("runs/*/*/checkpoints/step-*")), process)
        (trains,) = (child for child in psutil.Process(process.pid).children(recursive=True) if is_job(child))
        trains.send_signal(signal.SIGUSR2)
        _, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 1, err
    assert "job 2 failed: global_batch_size=61 is not divisible" in err
    (run_dir,) = run_dirs(tmp_path)
    record = read_record(run_dir)
    assert (record["status"], record["train"]["steps"]) == ("completed", 200)
    assert record["train"]["resumed_step"] >= 20
    assert "-m sparse2d.train " in record["command"]
    (manifest,) = tmp_path.glob("sweeps/*.json")
    states = [(job["status"], job["run"]) for job in json.loads(manifest.read_text())["jobs"]]
    assert states == [("completed", str(run_dir)), ("failed", None)]


def is_job(process: psutil.Process) -> bool:
    """Whether a process is what submitit runs a job in; the one that failed may be about to be gone."""
    try:
        return "submitit.core._submit" in process.cmdline()
    except psutil.Error:
        return False
