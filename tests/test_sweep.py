"""Unions of grids: which jobs an experiment and a command line make."""

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from configs import composing, experiments_of, tiny_overrides
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_plugins.sparse2d_sweeper.union_sweeper import UnionSweeper
from sparse2d.config import conf_dir
from sparse2d.data.dataset import open_dataset
from sparse2d.records import RunDirectory, fingerprint

EXPERIMENTS = experiments_of("train")
OPTIMIZERS = ("rowwise_adagrad", "momentum_scaled_rowwise_adagrad")


def jobs(arms: list[str], params: dict[str, str], arguments: list[str]) -> list[list[str]]:
    """The jobs, with Hydra's own parser and configs."""
    sweeper = UnionSweeper(arms, params)
    with composing(conf_dir()):
        sweeper._hydra_context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=None)
        return sweeper.jobs(arguments)


def test_command_line_alone_is_one_grid():
    assert jobs([], {}, ["seed=0,1", "optimizer=sgd", "sync.interval=1,4"]) == [
        ["seed=0", "optimizer=sgd", "sync.interval=1"],
        ["seed=0", "optimizer=sgd", "sync.interval=4"],
        ["seed=1", "optimizer=sgd", "sync.interval=1"],
        ["seed=1", "optimizer=sgd", "sync.interval=4"],
    ]


def test_arms_are_united_in_order_not_crossed():
    arms = ["parallelism=full_mp", "parallelism=sparse_2d parallelism.num_groups=2,4"]
    assert jobs(arms, {}, []) == [
        ["parallelism=full_mp"],
        ["parallelism=sparse_2d", "parallelism.num_groups=2"],
        ["parallelism=sparse_2d", "parallelism.num_groups=4"],
    ]


def test_params_and_the_command_line_are_crossed_with_every_arm():
    made = jobs(["parallelism=full_mp", "parallelism=data_parallel"], {"sync.interval": "1,2"}, ["seed=0,1"])
    assert len(made) == 8
    assert {tuple(sorted(job)) for job in made} == {
        tuple(sorted([f"parallelism={kind}", f"sync.interval={interval}", f"seed={seed}"]))
        for kind in ("full_mp", "data_parallel")
        for interval in (1, 2)
        for seed in (0, 1)
    }


def test_arms_win_over_params_and_the_command_line_over_both():
    arms, params = ["sync.interval=2", "seed=5"], {"sync.interval": "1", "seed": "0"}
    assert [sorted(job) for job in jobs(arms, params, [])] == [
        ["seed=0", "sync.interval=2"],
        ["seed=5", "sync.interval=1"],
    ]
    assert [sorted(job) for job in jobs(arms, params, ["sync.interval=9"])] == [
        ["seed=0", "sync.interval=9"],
        ["seed=5", "sync.interval=9"],
    ]


def test_jobs_that_the_command_line_makes_equal_run_once():
    arms = ["parallelism=sparse_2d parallelism.num_groups=2,4,8", "parallelism=sparse_2d parallelism.num_groups=4"]
    made = jobs(arms, {}, ["parallelism.num_groups=2"])
    assert made == [["parallelism=sparse_2d", "parallelism.num_groups=2"]]


def test_values_with_blanks_and_brackets_reach_the_job_as_they_are(composed):
    (job,) = jobs(["data=criteo_kaggle model.over_arch=[8,1]"], {}, ['data.path="/tmp/my rows, all.tsv"'])
    config = composed("train", *job)
    assert config.data.path == "/tmp/my rows, all.tsv"
    assert config.model.over_arch == [8, 1]


GRID = st.dictionaries(
    st.sampled_from(["seed", "sync.interval", "max_steps"]), st.sets(st.integers(1, 4), min_size=1), min_size=1
)


@settings(max_examples=25)
@given(st.lists(GRID, max_size=3), GRID)
def test_jobs_are_the_set_that_nested_loops_make(arms, arguments):
    def line(grid: dict[str, set[int]]) -> list[str]:
        return [f"{key}={','.join(map(str, sorted(values)))}" for key, values in grid.items()]

    expected = set()
    for arm in arms or [{}]:
        cells: list[frozenset[str]] = [frozenset()]
        for key, values in (arm | arguments).items():
            cells = [cell | {f"{key}={value}"} for cell in cells for value in values]
        expected |= set(cells)
    made = jobs([" ".join(line(arm)) for arm in arms], {}, line(arguments))
    assert {frozenset(job) for job in made} == expected
    assert len(made) == len(expected)


def experiment_jobs(composed: Callable, name: str, *arguments: str) -> list[list[str]]:
    sweeper = composed("train", f"experiment={name}", with_hydra=True).hydra.sweeper
    return jobs(list(sweeper.arms), dict(sweeper.params), [f"experiment={name}", *arguments])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_job_of_an_experiment_has_its_own_fingerprint(name, composed, train_config):
    # One seed: to compose each job takes longer than everything else here.
    made = experiment_jobs(composed, name, "seed=0")
    prints = {fingerprint(train_config(*job), "0" * 64) for job in made}
    assert len(prints) == len(made)


def test_ne_parity_compares_full_mp_with_2d_under_each_rule_and_on_real_ranks(composed, train_config):
    configs = [train_config(*job) for job in experiment_jobs(composed, "ne_parity", "seed=0")]
    layouts = Counter(
        (c.engine.name, c.parallelism.num_groups, c.optimizer.name.name, c.sync.combine.name) for c in configs
    )
    plain, scaled = OPTIMIZERS
    rules = [(plain, "mean"), (plain, "merged_gradient"), (scaled, "mean")]
    two_d = [("emulated", m, *rule) for m in (2, 4, 8, 16) for rule in rules]
    real = [("distributed", 1, plain, "mean"), ("distributed", 8, scaled, "mean")]
    assert layouts == Counter([("emulated", 1, plain, "mean"), *two_d, *real])
    assert {(c.engine.name, c.launch.num_ranks) for c in configs} == {("emulated", 16), ("distributed", 8)}


@pytest.mark.parametrize(("options", "statuses"), [(["fail_fast=true"], ["failed", "waiting"]), ([], ["failed"] * 2)])
def test_fail_fast_ends_the_sweep_at_the_first_failure(options, statuses, program, tmp_path):
    """Jobs that are refused before any rank starts."""
    ended = program("train", "-m", f"results_dir={tmp_path}", *options, "global_batch_size=511,513")
    (manifest,) = tmp_path.glob("sweeps/*.json")
    assert [job["status"] for job in json.loads(manifest.read_text())["jobs"]] == statuses
    failed = ", ".join(str(number) for number, status in enumerate(statuses, 1) if status == "failed")
    text = f"{statuses.count('failed')} of 2 jobs failed (job {failed}): {manifest}"
    assert (ended.code, ended.err) == (1, f"sparse2d.train: error: {text}\n")
    assert ("job 2 failed: global_batch_size=513" in ended.log) == ("waiting" not in statuses)


def test_a_sweep_whose_results_cannot_be_written_is_refused(program, tmp_path):
    (tmp_path / "file").touch()
    ended = program("train", "-m", f"results_dir={tmp_path / 'file'}", "seed=0,1")
    assert ended.code == 1
    assert f"results_dir={tmp_path / 'file'} must be writable" in ended.err


def test_a_run_that_another_process_is_at_comes_last(program, train_config, tiny_dataset, tmp_path, monkeypatch):
    """And is waited for; it is neither failed nor run twice."""
    arguments = tiny_overrides(tmp_path, tiny_dataset.parent)
    run = RunDirectory(train_config(*arguments, "global_batch_size=60"), open_dataset(tiny_dataset).digest)
    run.begin()

    def finish(_: float) -> None:
        run.finish("completed", None, {"eval": {"ne": 0.9, "auc": 0.7}, "train": {"qps": 1.0}})

    # What the other process does while the sweep waits for it.
    monkeypatch.setattr("hydra_plugins.sparse2d_sweeper.union_sweeper.time", SimpleNamespace(sleep=finish))
    # The second job is refused before it starts any rank.
    ended = program("train", "-m", *arguments, "global_batch_size=60,61")
    assert ended.err.startswith("sparse2d.train: error: 1 of 2 jobs failed (job 2): ")
    assert ended.log.count("job 1: another process is at it; it comes last") == 2
    assert ended.log.index("job 2 failed") < ended.log.index("already finished")
    (manifest,) = tmp_path.glob("sweeps/*.json")
    states = [(job["status"], job["run"]) for job in json.loads(manifest.read_text())["jobs"]]
    assert states == [("completed", str(run.path)), ("failed", None)]
