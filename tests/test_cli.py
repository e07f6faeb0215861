"""What a user reads when something is wrong: one line on standard error, and exit code 1."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

LINE = "\t".join(["0", *["1"] * 13, *["0000000a"] * 26])


def assert_one_line(ended, name, text):
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith(f"sparse2d.{name}: error: ")
    assert text in ended.err


@pytest.mark.parametrize("name", ["train", "simulate", "preprocess", "reproduce", "checkpoint", "testbed"])
def test_help_imports_nothing_heavy(name):
    command = [sys.executable, "-X", "importtime", "-m", f"sparse2d.{name}", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    imported = {line.rpartition("|")[2].strip() for line in told.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "torchrec", "fbgemm_gpu", "pandas", "matplotlib", "wandb", "sklearn"}


def test_ranks_that_torchrun_did_not_start_are_refused(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("train", "launch.num_ranks=4", text="launch.num_ranks=4, but torchrun has started 2 ranks; leave it out or")


@pytest.fixture
def refused(program, tmp_path):
    """Run a program that must refuse its options before anything is written."""

    def run(name, *arguments, text):
        results = tmp_path / "results"
        assert_one_line(program(name, f"results_dir={results}", *arguments), name, text)
        assert not results.exists()

    return run


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("+optimizer.lrr=1", "unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("optimizer.lrr=1", "unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("++data.evalrows=1", "unknown option 'data.evalrows'; did you mean 'data.eval_rows'?"),
        ("data.synthetic.row=1", "unknown option 'data.synthetic.row'; did you mean 'data.synthetic.rows'?"),
        ("optimizer={lr:1,momentum:2}", "unknown option 'optimizer.momentum'"),
        ("optimzer=sgd", "unknown option 'optimzer'; did you mean 'optimizer'?"),
        ("global_batchsize=64", "did you mean 'global_batch_size'?"),
        ("optimizer=sgdd", "no config optimizer/sgdd; choose from: adagrad, adam, momentum_"),
        ("experiment=nosuch", "no config experiment/nosuch; choose from: batch_size, "),
        ("experiment=null", "each group (checkpoint, "),
        ("optimizer=3", "each group (checkpoint, "),
        ("optimizer.name=lamb", "optimizer.name: Invalid value 'lamb', expected one of [sgd, "),
        ("optimizer.lr=fast", "optimizer.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("max_steps=1.5", "max_steps: Value '1.5' of type 'float' could not be converted to Integer"),
        ("parallelism.sharding=table_wise", "table_wise is no list; write parallelism.sharding=[table_wise]"),
        ("results_dir=null", "'results_dir' is not Optional"),
        ("foo", "cannot read the override 'foo': expected key=value"),
        ("seed==[", "cannot read the override 'seed==['"),
        ("seed=0,1", "several values make a sweep, which takes -m"),
        ("~optimizer", "option optimizer.name needs a value: add optimizer.name=..."),
        ("global_batch_size=513", "use 512 or 520"),
        ("data=criteo_kaggle", "data.path is not set; give a raw Criteo file"),
    ],
)
def test_wrong_options_are_told_in_one_line(argument, text, refused):
    refused("train", argument, text=text)


def test_a_sweep_has_no_options_to_show(refused):
    refused("train", "-m", "--cfg", "job", text="leave -m out to see the options of one job")


def test_groups_that_do_not_divide_the_ranks(refused):
    refused("train", "parallelism=sparse_2d", "parallelism.num_groups=3", text="choose M from [1, 2, 4, 8]")


@pytest.mark.parametrize("name", ["train", "preprocess"])
def test_data_that_is_not_there(name, refused, tmp_path):
    path = tmp_path / "nothing.tsv"
    refused(name, "data=criteo_kaggle", f"data.path={path}", text=f"data.path={path} does not exist; give a raw")


@pytest.mark.parametrize(("name", "argument"), [("preprocess", "data.pth=x"), ("report", "table=[x]")])
def test_all_programs_name_the_nearest_option(name, argument, refused):
    refused(name, argument, text="did you mean")


def test_too_few_rows_for_one_batch(program, tmp_path):
    ended = program("train", f"results_dir={tmp_path}", "data.synthetic.rows=700", "global_batch_size=608")
    assert_one_line(ended, "train", "600 training rows fill no batch of global_batch_size=608; lower it")


def test_sweeps_refuse_a_wrong_job_before_the_first_one_runs(refused):
    refused("train", "-m", "optimizer=sgd,sgdd", text="no config optimizer/sgdd; choose from")


@pytest.mark.parametrize("name", ["train", "preprocess"])
@pytest.mark.parametrize(
    ("content", "place", "text"),
    [
        ([LINE, LINE.rsplit("\t", 2)[0]], ":2", "38 fields, expected 40"),
        ([LINE, LINE, LINE.split("\t", 1)[1]], ":3", "39 fields, expected 40 (no label?)"),
        ([LINE + "\t0", LINE, LINE], ":1", "41 fields, expected 40"),
        ([LINE, "", LINE], ":2", "blank line"),
        ([LINE, "2" + LINE[1:]], ":2", "label is '2', expected 0 or 1"),
        ([], "", "0 rows (the file is empty)"),
    ],
)
def test_wrong_rows_are_told_with_file_and_line(name, content, place, text, program, tmp_path):
    for suffix, opener in (("tsv", open), ("tsv.gz", gzip.open)):
        path = tmp_path / f"rows.{suffix}"
        with opener(path, "wt") as file:
            file.writelines(f"{line}\n" for line in content)
        ended = program(name, "data=criteo_kaggle", f"data.path={path}", f"results_dir={tmp_path / 'results'}")
        assert_one_line(ended, name, f"{path}{place}: {text}")
        assert not list((tmp_path / "results").rglob("*.npy"))


def test_report_without_runs(program, tmp_path):
    ended = program("report", f"results_dir={tmp_path}")
    assert_one_line(ended, "report", "first run python -m sparse2d.train -m experiment=ne_parity")


def test_report_of_an_unknown_table(refused):
    refused("report", "tables=[ne]", text="unknown table 'ne'; choose from: ne_parity")


def test_bugs_keep_their_traceback(program, tmp_path, monkeypatch):
    """Only what a user can act on is cut to one line."""

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("sparse2d.train.check_train", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        program("train", f"results_dir={tmp_path}")


def run_module(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "HYDRA_FULL_ERROR")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_help_lists_groups_and_options(tmp_path):
    done = run_module("sparse2d.train", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "parallelism: data_parallel, full_mp, sparse_2d",
        "optimizer: adagrad, adam, momentum_",
        "global_batch_size: 512",
        "launch: local, slurm",
    ):
        assert text in done.stdout
    # Of other programs.
    for text in ("workload: ", "hardware: ", "exfm_scaling"):
        assert text not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sparse2d.train", "optimizer.lrr=1"], "unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (["sparse2d.preprocess", "data=criteo_kaggle", "data.path=rows.tsv"], "rows.tsv:2: 39 fields, expected 40"),
    ],
)
def test_one_line_is_all_that_a_terminal_shows(arguments, text, tmp_path):
    (tmp_path / "rows.tsv").write_text(f"{LINE}\n{LINE[2:]}\n")
    done = run_module(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    # The ingest says what it needs before it starts; the failure itself is one line, the last.
    assert [line for line in done.stderr.splitlines() if "error" in line] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    assert text in done.stderr
