"""Whole runs: real ranks, real files, real wandb folders."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import failing_run
import numpy as np
import psutil
import pytest
import yaml
from configs import tiny_data, tiny_overrides
from programs import PATIENCE_S, environment, started, wait_until
from wandb_files import exit_codes, logged_keys, logged_steps, offline_runs, started_as, summary_of

from sparse2d.data.dataset import open_dataset
from sparse2d.data.prepare import prepare

TWO_D = ["parallelism=sparse_2d", "parallelism.num_groups=2"]
# Steps enough for a signal to arrive in the middle.
LONG = 60_000
RECORD_KEYS = {
    "": "schema status error provenance experiment fingerprint command git_commit git_dirty versions host started_at "
    "finished_at wall_s seed config data eval train plan comms memory",
    "data": "name digest train_rows eval_rows base_rate",
    "eval": "ne auc logloss calibration rows",
    "train": "rows steps qps step_ms loss_last threads_per_rank",
    "plan": "num_shards rows_per_rank bytes_per_rank imbalance load_ms_per_rank load_imbalance",
    "comms": "lookup_bytes_per_step sync_bytes_per_sync sync_ms_p50 dense_bytes_per_step",
    "memory": "peak_rss_bytes",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Where all runs here keep their prepared rows, the short and the long dataset."""
    folder = tmp_path_factory.mktemp("rows")
    prepare(tiny_data(folder), progress=False)
    prepare(tiny_data(folder, LONG), progress=False)
    return folder


def run_dirs(results_dir: Path) -> list[Path]:
    return sorted(path for path in results_dir.glob("runs/*/*") if path.is_dir())


def read_record(run_dir: Path) -> dict:
    return json.loads((run_dir / "record.json").read_text())


def points(run_dir: Path) -> list[dict]:
    """Logged points; what is there while the run goes on must be whole lines of JSON, too."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def without_measurements(point: dict) -> dict:
    """What two runs with the same bits have in common."""
    return {key: value for key, value in point.items() if key != "qps" and not key.startswith("rank0/")}


def is_training(results_dir: Path) -> bool:
    return any(points(run_dir) for run_dir in run_dirs(results_dir))


@dataclass(frozen=True)
class Sweep:
    """A finished sweep of four jobs, of which the first and the third diverge."""

    code: int
    err: str
    results_dir: Path
    arguments: list[str]
    manifest: Path
    completed: list[Path]
    failed: list[Path]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, data_dir) -> Sweep:
    results = tmp_path_factory.mktemp("sweep")
    arguments = [*tiny_overrides(results, data_dir), *TWO_D, "optimizer=sgd", "launch.threads_per_rank=2", "seed=0,1"]
    with started("-m", *arguments, "optimizer.lr=1e38,1.0") as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    by_status: dict[str, list[Path]] = {"completed": [], "failed": []}
    for path in run_dirs(results):
        by_status[read_record(path)["status"]].append(path)
    (manifest,) = results.glob("sweeps/*.json")
    return Sweep(process.returncode, err, results, arguments, manifest, **by_status)


def test_one_folder_and_one_wandb_run_for_each_job(sweep):
    assert len(sweep.completed) == len(sweep.failed) == 2
    for run_dir in run_dirs(sweep.results_dir):
        assert len(offline_runs(run_dir)) == 1
        assert read_record(run_dir)["fingerprint"] == run_dir.name
    assert sorted(read_record(path)["seed"] for path in sweep.completed) == [0, 1]
    assert sorted(read_record(path)["seed"] for path in sweep.failed) == [0, 1]


def test_failing_jobs_are_told_at_once_and_the_others_run(sweep):
    assert sweep.code == 1
    reason = "the loss is not finite at step 2 on rank "
    for number in (1, 3):
        failure, following = (
            sweep.err.index(f"job {number} failed: {reason}"),
            sweep.err.index(f"job {number + 1} of 4"),
        )
        assert failure < following
    assert sweep.err.splitlines()[-1] == f"sparse2d.train: error: 2 of 4 jobs failed (job 1, 3): {sweep.manifest}"
    assert "Traceback" not in sweep.err
    for path in sweep.failed:
        record = read_record(path)
        assert record["error"].startswith(reason)
        assert record["config"]["optimizer"]["lr"] == 1e38
        assert not points(path)


def test_wandb_runs_end_as_their_jobs_do(sweep):
    assert [exit_codes(file) for path in sweep.completed for file in offline_runs(path)] == [[0], [0]]
    assert [exit_codes(file) for path in sweep.failed for file in offline_runs(path)] == [[1], [1]]


def test_the_manifest_says_what_became_of_each_job(sweep):
    jobs = json.loads(sweep.manifest.read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "completed"] * 2
    for job in jobs:
        run_dir = Path(job["run"])
        assert run_dir in (sweep.failed if job["status"] == "failed" else sweep.completed)
        assert read_record(run_dir)["error"] == job["error"]
        assert f"seed={read_record(run_dir)['seed']}" in job["overrides"]


def test_seeds_of_a_configuration_are_one_wandb_group(sweep):
    def groups(run_dirs: list[Path]) -> set[str]:
        return {started_as(file).run_group for path in run_dirs for file in offline_runs(path)}

    assert len(groups(sweep.completed)) == len(groups(sweep.failed)) == 1
    assert groups(sweep.completed) != groups(sweep.failed)


def test_wandb_has_the_curves_the_tables_columns_the_plan_and_the_picture(sweep):
    for path in sweep.completed:
        record = read_record(path)
        (file,) = offline_runs(path)
        curves = {"train/loss", "train/ne", "train/qps", "eval/ne", "eval/auc"}
        assert curves | {"rank0/sent_bytes_per_step", "rank0/peak_rss_bytes"} <= logged_keys(file)
        summary = summary_of(file)
        for name in ("ne", "auc"):
            assert summary[name] == record["eval"][name]
        assert (summary["num_groups"], summary["parallelism"], summary["label"]) == (2, "sparse_2d", "measured")
        assert summary["sync_bytes_per_sync"] == record["comms"]["sync_bytes_per_sync"]["mean"] > 0
        (table,) = path.glob("wandb/offline-run-*/files/media/table/plan_*.json")
        shards = json.loads(table.read_text())
        assert len(shards["data"]) == record["plan"]["num_shards"] == 26
        (picture,) = path.glob("wandb/offline-run-*/files/media/images/curves_*.png")
        assert picture.read_bytes() == (path / "curves.png").read_bytes()


def test_record_has_every_part(sweep):
    for path in sweep.completed:
        record = read_record(path)
        for part, keys in RECORD_KEYS.items():
            assert set(keys.split()) <= (record[part] if part else record).keys()
        assert (record["status"], record["error"], record["provenance"]) == ("completed", None, "measured")
        assert record["command"].startswith("python")
        assert "-m sparse2d.train -m " in record["command"]
        assert datetime.fromisoformat(record["started_at"]) <= datetime.fromisoformat(record["finished_at"])
        assert len(record["git_commit"] or "0" * 40) == 40


def test_record_says_what_was_run(sweep, data_dir):
    dataset = open_dataset(next(path for path in data_dir.iterdir() if len_labels(path) == 1400))
    for path in sweep.completed:
        record = read_record(path)
        assert record["data"] == {
            "name": "tiny",
            "digest": dataset.digest,
            "train_rows": 1200,
            "eval_rows": 200,
            "base_rate": pytest.approx(float(np.mean(dataset.days[0].labels[:1200]))),
        }
        train = record["train"]
        assert (train["rows"], train["steps"], train["threads_per_rank"]) == (1200, 20, 2)
        assert 0 < train["step_ms"]["p10"] <= train["step_ms"]["p50"] <= train["step_ms"]["p90"]
        # Ten of twenty steps are timed, so that the mean step is 60 rows over QPS.
        assert train["step_ms"]["p10"] * 0.5 <= 60_000 / train["qps"] <= train["step_ms"]["p90"] * 5
        assert record["eval"]["rows"] == 200
        assert record["eval_constant"]["ne"] == pytest.approx(1.0, abs=1e-12)
        # Two groups of one rank: all of 26 tables of 40 to 65 rows of 8 floats on it; sgd keeps no state.
        assert record["plan"]["bytes_per_rank"] == [sum(range(40, 66)) * 8 * 4]
        assert record["comms"]["sync_ms_p50"] > 0
        assert record["memory"]["peak_rss_bytes"] > 50e6


def len_labels(path: Path) -> int:
    return len(np.load(path / "day_0_labels.npy", mmap_mode="r")) if path.is_dir() else 0


def test_metrics_grow_step_by_step_and_end_with_the_evaluation(sweep):
    for path in sweep.completed:
        *training, evaluation = points(path)
        assert [point["step"] for point in training] == [5, 10, 15, 20]
        assert [point["rows"] for point in training] == [300, 600, 900, 1200]
        assert training[0]["qps"] is None
        assert training[-1]["loss"] == read_record(path)["train"]["loss_last"]
        expected = {f"eval/{key}": value for key, value in read_record(path)["eval"].items()}
        assert evaluation == {"step": 20} | expected
        (file,) = offline_runs(path)
        assert logged_steps(file) == [0, 5, 10, 15, 20]


def test_config_and_log_lie_beside_the_record(sweep):
    digest = read_record(sweep.completed[0])["data"]["digest"]
    assert f"data: tiny, digest {digest[:12]}\n" in (sweep.completed[0] / "run.log").read_text()
    for path in sweep.completed:
        assert yaml.safe_load((path / "config.yaml").read_text()) == read_record(path)["config"]
        log = (path / "run.log").read_text()
        assert [f"step {step}: " in log for step in (5, 10, 15, 20)] == [True] * 4


def test_without_a_terminal_progress_is_plain_lines(sweep):
    assert "\nstep 20: rows 1200 loss 0." in sweep.err
    assert not {"\r", "\x1b"} & set(sweep.err)


def test_finished_jobs_are_not_run_again(sweep, program):
    before = {path: (path / "record.json").read_bytes() for path in sweep.completed}
    ended = program("train", "-m", *sweep.arguments, "optimizer.lr=1.0")
    assert ended.code == 0
    assert ended.log.count("already finished (rerun=true runs it again): NE ") == 2
    assert {path: (path / "record.json").read_bytes() for path in sweep.completed} == before
    assert len(run_dirs(sweep.results_dir)) == 4


def test_rerun_runs_a_finished_job_again(sweep, program):
    path = next(path for path in sweep.completed if read_record(path)["seed"] == 1)
    before = read_record(path)
    arguments = [argument for argument in sweep.arguments if not argument.startswith("seed=")]
    ended = program("train", *arguments, "optimizer.lr=1.0", "seed=1", "rerun=true")
    assert ended.code == 0
    after = read_record(path)
    assert after["started_at"] > before["started_at"]
    assert after["eval"] == before["eval"]
    assert [point["step"] for point in points(path)] == [5, 10, 15, 20, 20]


def test_failed_jobs_are_run_again(sweep, program):
    arguments = [argument for argument in sweep.arguments if not argument.startswith("seed=")]
    ended = program("train", *arguments, "optimizer.lr=1e38", "seed=0")
    assert ended.code == 1
    assert ended.err.startswith("sparse2d.train: error: the loss is not finite at step 2 on rank ")
    assert ended.err.count("\n") == 1


def test_neither_the_pipeline_nor_evaluations_on_the_way_change_a_figure(data_dir, tmp_path, program):
    logged = []
    for options in (["pipeline=none"], ["pipeline=sparse_dist", "eval_every=10"]):
        results = tmp_path / str(len(logged))
        arguments = [*tiny_overrides(results, data_dir), *TWO_D, "tracking=none", *options]
        assert program("train", *arguments).code == 0
        (run_dir,) = run_dirs(results)
        logged.append([without_measurements(point) for point in points(run_dir)])
    plain, evaluated = logged
    assert [point for point in evaluated if not {"rows", "eval/ne"} <= point.keys()] == plain
    (halfway,) = [point for point in evaluated if {"rows", "eval/ne"} <= point.keys()]
    assert (halfway["step"], halfway["rows"], halfway["eval/rows"]) == (10, 600, 200)
    assert halfway["eval/ne"] != plain[-1]["eval/ne"]


@pytest.fixture
def prepared(data_dir, tmp_path) -> Path:
    """A copy of the prepared rows, to be damaged."""
    folder = next(path for path in data_dir.iterdir() if len_labels(path) == 1400)
    return shutil.copytree(folder, tmp_path / "prepared")


def run_prepared(program, folder: Path, *arguments: str):
    overrides = tiny_overrides(folder.parent / "results", folder.parent / "unused")
    return program("train", *overrides, "data.source=raw", f"data.path={folder}", "tracking=none", *arguments)


@pytest.mark.parametrize(("row", "identifier"), [(610, 65), (1199, -1), (1399, 2**31 - 1)])
def test_id_out_of_range_in_an_array_is_refused_with_feature_id_and_limit(row, identifier, prepared, program):
    ids = np.load(prepared / "day_0_sparse.npy", mmap_mode="r+")
    ids[row, 25] = identifier
    ids.flush()
    ended = run_prepared(program, prepared)
    assert ended.code == 1
    expected = f"{prepared / 'day_0_sparse.npy'}: row {row}: C26 has id {identifier}, expected 0 to 64"
    assert ended.err == f"sparse2d.train: error: {expected}; delete {prepared} and prepare it again\n"
    # Known before any rank starts: there is no run to record.
    assert run_dirs(prepared.parent / "results") == []


def test_tables_too_small_for_the_ids_are_refused_before_training(prepared, program):
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["num_embeddings"][2] = 3
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    largest = np.load(prepared / "day_0_sparse.npy")[:, 2].max()
    ended = run_prepared(program, prepared)
    assert ended.code == 1
    assert f"{prepared}: C3 has id {largest}, expected 0 to 2;" in ended.err
    assert not (prepared.parent / "results").exists()


def test_a_prepared_folder_trains_like_the_rows_it_was_made_from(prepared, program, sweep):
    ended = run_prepared(program, prepared, *TWO_D, "optimizer=sgd", "optimizer.lr=1.0", "seed=0")
    assert "replicas are merged by mean, every 1 steps (sync.combine=auto, optimizer=sgd)" in ended.log
    assert ended.code == 0
    (run_dir,) = run_dirs(prepared.parent / "results")
    same = next(path for path in sweep.completed if read_record(path)["seed"] == 0)
    assert read_record(run_dir)["eval"] == read_record(same)["eval"]
    assert not (run_dir / "wandb").exists()


def test_the_launcher_leaves_torchrec_to_its_ranks(tmp_path, data_dir):
    source = f"""
import sys
from sparse2d import cli, config, train

sys.argv[1:] = {tiny_overrides(tmp_path, data_dir)}
cli.run_entry_point("train", config.TrainConfig, train.main)
print(*sys.modules)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 1
    assert {"torch", "fbgemm_gpu"} < set(done.stdout.split())
    assert "torchrec" not in done.stdout.split()


def test_a_bug_in_one_rank_ends_all_with_the_first_cause(tmp_path, data_dir):
    command = [sys.executable, failing_run.__file__, *tiny_overrides(tmp_path, data_dir)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    (run_dir,) = run_dirs(tmp_path)
    record = read_record(run_dir)
    cause = "rank 1: IndexError: no such thing as step 3"
    assert (record["status"], record["error"]) == ("failed", cause)
    # The other rank's loss of its peer is no news.
    assert cause in done.stderr
    assert "rank 0:" not in done.stderr
    assert "in train_step_with_a_bug" in (run_dir / "run.log").read_text()
    assert [exit_codes(file) for file in offline_runs(run_dir)] == [[1]]


@pytest.mark.parametrize(("room", "recorded"), [(5000, False), (15_000, True)])
def test_a_full_disk_ends_a_run_in_one_line_with_or_without_a_record(room, recorded, tmp_path, data_dir):
    """A limit on the size of each file stands for it: the points of training grow beyond it."""
    resource = pytest.importorskip("resource")
    options = [*tiny_overrides(tmp_path, data_dir, LONG), "engine=emulated", "log_every=1", "tracking=none"]
    with started(*options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    *_, before, last = err.splitlines()
    told = f"File too large; results_dir={tmp_path} must be writable, with room"
    assert last == f"sparse2d.train: error: {told}"
    assert "Traceback" not in err
    (run_dir,) = run_dirs(tmp_path)
    if recorded:
        record = read_record(run_dir)
        assert (record["status"], record["error"]) == ("failed", told)
    else:
        assert before == f"no record could be written: {told}"
        assert not (run_dir / "record.json").exists()


def test_results_in_a_file_are_refused(prepared, program):
    (prepared.parent / "results").touch()
    ended = run_prepared(program, prepared)
    assert ended.code == 1
    assert re.fullmatch(
        rf"sparse2d.train: error: {prepared.parent}/results/\S+: Not a directory; results_dir=\S+ must be .*\n",
        ended.err,
    )


@pytest.mark.slow
def test_signals_end_runs_in_seconds(tmp_path, data_dir):
    """Ctrl-C, which reaches all processes of a terminal, and SIGTERM to the launcher alone; both end a sweep."""
    ends = {"interrupted": (os.killpg, signal.SIGINT, 130), "terminated": (os.kill, signal.SIGTERM, 143)}
    saves = {"interrupted": ["checkpoint.interval=1000"], "terminated": []}
    with ExitStack() as stack:
        processes = {
            line: stack.enter_context(
                started("-m", *tiny_overrides(tmp_path / line, data_dir, LONG), *saves[line], "seed=0,1")
            )
            for line in ends
        }
        families = {}
        for line, (send, sent, _) in ends.items():
            wait_until(lambda line=line: is_training(tmp_path / line), processes[line])
            families[line] = psutil.Process(processes[line].pid).children(recursive=True)
            send(processes[line].pid, sent)
        for line, process in processes.items():
            _, err = process.communicate(timeout=60)
            _, alive = psutil.wait_procs(families[line], timeout=30)
            assert alive == []
            assert process.returncode == ends[line][2]
            assert err.splitlines()[-1] == f"sparse2d.train: {line}"
            assert "Traceback" not in err
            (run_dir,) = run_dirs(tmp_path / line)
            assert read_record(run_dir)["status"] == "interrupted"
            told = "stopped, and no step was saved (checkpoint.interval has steps saved); this run starts anew"
            if saves[line]:
                (newest,) = (run_dir / "checkpoints").glob("step-*")
                step = int(newest.name.removeprefix("step-"))
                told = f"stopped; the same command goes on from step {step}, the last one saved: {newest}"
            assert read_record(run_dir)["error"] == told
            assert told in err.splitlines()
            assert points(run_dir)[-1]["step"] < LONG * 6 / 7 / 60 - 5
            assert [exit_codes(file) for file in offline_runs(run_dir)] == [[1]]
            (manifest,) = (tmp_path / line).glob("sweeps/*.json")
            assert [job["status"] for job in json.loads(manifest.read_text())["jobs"]] == ["interrupted", "waiting"]


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_rank_and_continues_where_it_stopped(tmp_path, data_dir, program):
    arguments = ["-m", *tiny_overrides(tmp_path, data_dir, LONG), "max_steps=10,200"]

    def by_steps() -> dict[int, Path]:
        # A folder is there before the config in it.
        configs = {path.parent: yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/*/config.yaml")}
        return {config["max_steps"]: path for path, config in configs.items()}

    with started(*arguments) as process:
        wait_until(lambda: 200 in (runs := by_steps()) and points(runs[200]), process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []
    runs = by_steps()
    assert not (runs[200] / "record.json").exists()
    before = (runs[10] / "record.json").read_bytes()
    ended = program("train", *arguments)
    assert ended.code == 0
    assert ended.log.count("already finished") == 1
    assert by_steps() == runs
    assert (runs[10] / "record.json").read_bytes() == before
    assert [read_record(runs[steps])["train"]["steps"] for steps in (10, 200)] == [10, 200]
    assert [point["step"] for point in points(runs[200])] == [*range(5, 201, 5), 200]


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_and_no_question_about_a_missing_wandb_key(tmp_path, data_dir):
    """Online without a key: wandb would ask for one where there is a terminal to ask on."""
    ours, theirs = pty.openpty()
    home = tmp_path / "home"
    home.mkdir()
    variables = environment(HOME=str(home), TERM="xterm-256color", COLUMNS="100")
    variables = {name: value for name, value in variables.items() if name not in ("WANDB_API_KEY", "NETRC")}
    untrained = ["optimizer.lr=0", "optimizer.dense.lr=0"]
    arguments = [*tiny_overrides(tmp_path / "results", data_dir), *untrained, "tracking.mode=online"]
    with started(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        shown = b""
        while process.poll() is None or shown[-1:] == b"":
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # the terminal is closed on the other side
                break
        process.wait(PATIENCE_S)
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert process.returncode == 0, text
    lines = re.split(r"[\r\n]+", text)
    assert any(re.search(r"━ +\d+/20 ", line) for line in lines)
    assert any(re.search(r"━ .*eval/ne 1\.", line) for line in lines)
    # Never on one line with the bar.
    assert sum(bool(re.fullmatch(r"NE 1\.\d+ is no better than a constant predictor", line)) for line in lines) == 1
    assert "step 5: " not in text
    assert text.count("there is no wandb key (run `wandb login`): this run is kept offline") == 1
    (run_dir,) = run_dirs(tmp_path / "results")
    assert [exit_codes(file) for file in offline_runs(run_dir)] == [[0]]


@pytest.mark.slow
def test_torchrun_runs_the_same_jobs(tmp_path, data_dir, program):
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m sparse2d.train"
    arguments = [*TWO_D, "optimizer=sgd", "launch.threads_per_rank=2", "seed=0,1"]
    # Its world has two ranks, whatever the option says.
    overrides = [text for text in tiny_overrides(tmp_path, data_dir) if "num_ranks" not in text]
    # Rows per rank make the same global batch.
    weak = ["rank_batch_size=30" if "global_batch_size" in text else text for text in overrides]
    with started("-m", *weak, *arguments, module=launcher) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert err.count("job 2 of 2") == 1
    assert len(run_dirs(tmp_path)) == 2
    for run_dir in run_dirs(tmp_path):
        record = read_record(run_dir)
        assert record["status"] == "completed"
        assert [exit_codes(file) for file in offline_runs(run_dir)] == [[0]]
        assert [point["step"] for point in points(run_dir)] == [5, 10, 15, 20, 20]
        assert err.count("NE 1.0" if record["eval"]["ne"] >= 1 else "NE 0.9") >= 1
    # The same runs from our own launcher are the same runs: finished, and with the same fingerprints.
    ended = program("train", "-m", *tiny_overrides(tmp_path, data_dir), *arguments)
    assert ended.code == 0
    assert ended.log.count("already finished") == 2
