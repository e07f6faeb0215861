"""``python -m sparse2d.simulate``: files, tables, recommendation, and one line for each wrong input."""

import csv
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from configs import experiments_of

from sparse2d.config import conf_dir
from sparse2d.cost.config import HardwareConfig, Task, check_simulate
from sparse2d.cost.model import predict
from sparse2d.cost.recommend import PLACEMENTS, best, choices, divisors, reasons
from sparse2d.cost.sweep import fingerprint
from sparse2d.cost.workload import make_workload
from sparse2d.simulate import as_override

CHOICES = [
    (group, path.stem)
    for group in ("workload", "hardware", "constants")
    for path in sorted((conf_dir() / group).glob("*.yaml"))
]
SMALL = ["workload=criteo_dcnv2", "constants=assumed", "num_gpus=16"]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_passes_and_names_itself(group, name, simulate_config):
    config = simulate_config(f"{group}={name}")
    check_simulate(config)
    if group != "constants":
        assert getattr(config, group).name == name
    if group == "workload":
        assert config.workload.assumptions


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "hardware"])
def test_every_number_of_a_cluster_has_its_source(name, simulate_config):
    machine = simulate_config(f"hardware={name}").hardware
    told = " ".join(machine.sources)
    for field in fields(HardwareConfig):
        if field.name not in ("name", "sources"):
            assert field.name in told, field.name


@pytest.mark.parametrize("name", experiments_of("simulate"))
def test_every_experiment_runs_and_writes_its_table(name, program, tmp_path, composed):
    ended = program("simulate", f"experiment={name}", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    assert "modelled" in ended.out
    assert composed("simulate", f"experiment={name}").experiment == name
    tables = list((tmp_path / "tables").glob("*.csv"))
    assert tables
    for path in tables:
        assert {row["label"] for row in table(path)} <= {"modelled", "paper"}


def test_a_sweep_has_the_columns_and_labels_that_readers_rely_on(program, tmp_path):
    assert program("simulate", "-m", "experiment=exfm_scaling", f"results_dir={tmp_path}").code == 0
    rows = table(tmp_path / "tables" / "exfm_scaling.csv")
    wanted = "label num_gpus parallelism num_groups qps qps_std n_seeds scaling_factor_pct peak_memory_pct imbalance"
    assert {*wanted.split(), "oom", "fingerprints"} <= set(rows[0])
    of_2d = {row["label"]: row for row in rows if row["num_gpus"] == "4096" and row["parallelism"] == "sparse_2d"}
    assert of_2d.keys() == {"paper", "modelled"}
    assert of_2d["paper"]["qps"] == "2.53e+06"
    assert of_2d["paper"]["fingerprints"] == "arXiv 2508.03854"
    assert of_2d["modelled"]["role"] == "prediction"
    ooms = {row["num_gpus"] for row in rows if row["parallelism"] == "full_mp" and row["oom"] == "True"}
    assert ooms == {"2048", "4096"}
    assert all(row["qps"] == "" for row in rows if row["oom"] == "True")


def test_a_point_prints_what_predict_says(program, simulate_config):
    ended = program("simulate", *SMALL, "parallelism.num_groups=2")
    found = predict(simulate_config(*SMALL, "parallelism.num_groups=2"))
    assert f"modelled: {found.qps:.4g} QPS" in ended.out
    assert "fits: peak" in ended.out
    assert f"a GPU sends at most {found.sent.lookup.max() / 1e9:.3g} GB a step for lookups" in ended.out


def test_a_layout_that_does_not_fit_is_said_so(program):
    ended = program("simulate", "num_gpus=4096")
    assert ended.code == 0
    assert "OUT OF MEMORY" in ended.out


def test_a_table_file_gives_the_same_as_listed_tables(program, tmp_path, simulate_config):
    listed = make_workload(simulate_config(*SMALL).workload)
    path = tmp_path / "tables.csv"
    lines = [f"{r:.0f},{d:.0f},{p}" for r, d, p in zip(listed.rows, listed.dims, listed.pooling, strict=True)]
    # As a spreadsheet writes it: a mark before the first column, blanks, and a line without values at the end.
    path.write_text("\n".join(["Rows, Dim, Pooling", *lines, ",,"]), encoding="utf-8-sig")
    same = ["workload.dense_tflop_per_sample=9.6e-5", "workload.dense_mparams=16", "workload.dense_memory_gb=4"]
    arguments = ["workload=from_csv", f"workload.path={path}", *same, *SMALL[1:]]
    found, expected = predict(simulate_config(*arguments)), predict(simulate_config(*SMALL))
    assert (found.step, found.memory) == (expected.step, expected.memory)
    assert program("simulate", *arguments).code == 0


def test_a_training_config_gives_its_tables(program, simulate_config):
    ended = program(
        "simulate",
        "workload=from_model",
        'workload.train=["data=criteo_1tb_multi_hot","model.embedding_dim=128","model.dense_arch=[64,128]"]',
        *SMALL[1:],
        "task=sweep",
        "grid.num_groups=[1]",
        "results_dir=/dev/null",
    )
    # The table's folder cannot be made, so that everything before it has worked.
    assert "the table cannot be written" in ended.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["parallelism.num_groups=3"], "parallelism.num_groups=3 does not divide the world size of 16 ranks"),
        (["parallelism.num_groups=0"], "parallelism.num_groups=0 must be a finite number above 0"),
        (["parallelism.sharding=[table_wise,rowwise]"], "parallelism.sharding[1]: Invalid value 'rowwise'"),
        (
            ["parallelism.sharding=[table_wise,grid_shard]"],
            "holds grid_shard, which is not modelled",
        ),
        (["parallelism.sharding=[row_wise]"], "lacks table_wise"),
        (["hardware.nic_gb_per_s=0"], "hardware.nic_gb_per_s=0.0 must be a finite number above 0"),
        (["hardware.nic_gb_per_s=nan"], "hardware.nic_gb_per_s=nan must be a finite number above 0"),
        (["constants.overlap_share=1.5"], "constants.overlap_share=1.5 must be a share between 0 and 1"),
        (["workload.pooling=[1,2]"], "workload.pooling has 2 entries for 26 tables; give 1 or 26"),
        (["workload.dims=[-4]"], "workload.dims holds -4; each must be a finite number above 0"),
        (["workload.rows=[]", "workload.pooling=[1]"], "workload criteo_dcnv2 has no tables"),
        (["workload.dense_tflop_per_sample=null"], "option workload.dense_tflop_per_sample needs a value"),
        (["workload.dense_memory_gb=100"], "workload.dense_memory_gb=100 leaves no memory for tables"),
        (["workload.rows=[10000000000]", "workload.pooling=[1]"], "take 5160.0 GB, a group of 16 ranks has 1113.6 GB"),
        (
            ["parallelism.sharding=[table_wise]", "workload.rows=[200000000]", "workload.pooling=[1]"],
            "on one rank, which has",
        ),
        (["workload=from_csv"], "workload.path is not set"),
        (["workload=from_csv", "workload.path=nothing.csv"], "nothing.csv: No such file"),
        (["workload=exfm_like", "workload.generated.dim_shares=[0.5,0.5]"], "must be a share for each of dims"),
        (["workload=exfm_like", "workload.generated.seed=-1"], "workload.generated.seed=-1 must be at least 0"),
        (
            ["workload=exfm_like", "workload.generated.num_tables=1000000000"],
            "num_tables=1000000000 must be 1 to 100000",
        ),
        (["workload=exfm_like", "workload.generated.total_gb=nan"], "total_gb=nan must be above 0"),
        (["workload=exfm_like", "workload.generated.pooling_sigma=-1"], "pooling_sigma=-1.0 must be 0 to 10"),
        (["hardware.gpus_per_nic=3"], "hardware.gpus_per_nic=3 does not divide gpus_per_host=8"),
        (["task=validate_runs"], "runs is empty"),
        (["table=../x"], "table=../x must be a name"),
        (["workload=from_model", 'workload.train=["bogus=1"]'], "workload.train: unknown option 'bogus'"),
        (["workload=from_model", 'workload.train=["model.embedding_dim=6"]'], "workload.train: model.embedding_dim=6"),
        (["task=validate_runs", "runs=[nowhere]"], "no completed run of full_mp or sparse_2d"),
        (["task=sweep", "grid.num_groups=[3]"], "the grid holds no layout"),
        (["workload.paper=dlrm", "task=calibrate"], "paper=dlrm: nothing published; choose from ['ctr', 'exfm']"),
        (["hardware=h200"], "no config hardware/h200; choose from: a100_8x200g"),
        (["hardware.nic=3"], "did you mean 'hardware.name'?"),
        (["task=recommend", "workload.dense_memory_gb=73"], "no layout of 16 x h100"),
        (["parallelism.plan_file=nothing.json"], "parallelism.plan_file=nothing.json: No such file"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments, text, program):
    ended = program("simulate", *SMALL, *arguments)
    assert ended.code == 1
    assert text in ended.err
    assert ended.err.startswith("sparse2d.simulate: error: ")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("rows,dim\n1,2\n", "no column 'pooling'; it needs rows, dim, pooling"),
        ("rows;dim;pooling\n1;2;3\n", "no column 'rows'; it needs rows, dim, pooling, between commas"),
        ("rows,dim,pooling,rows\n1,2,3,4\n", "column 'rows' is there twice"),
        ("rows,dim,pooling\n\n1,64,x\n", ":3: pooling=x: Input should be a valid number"),
        ("rows,dim,pooling\n1,64\n", ":2: 2 values for 3 columns"),
        ("rows,dim,pooling\n1,000,64,2\n", ":2: 4 values for 3 columns"),
        ("rows,dim,pooling\n1,64,-2\n", ":2: pooling=-2: Input should be greater than 0"),
        ("rows,dim,pooling\n1,64,nan\n", ":2: pooling=nan: Input should be a finite number"),
        ("rows,dim,pooling\n1,64,\n", ":2: pooling=: Field required"),
        ("rows,dim,pooling\ninf,64,1\n", ":2: rows=inf: Input should be a finite number"),
        ("rows,dim,pooling\n10M,64,1\n", ":2: rows=10M: Input should be a valid number"),
        ("rows,dim,pooling\n1000.5,64,1\n", ":2: rows=1000.5: Input should be a multiple of 1"),
        ("rows,dim,pooling,name\n1,64,1,a\n1,64,1,a\n", "two tables have the name 'a'"),
        ("rows,dim,pooling\n", "has no tables"),
    ],
)
def test_wrong_table_files_are_told_in_one_line(content, text, program, tmp_path):
    (tmp_path / "tables.csv").write_text(content)
    ended = program("simulate", "workload=from_csv", f"workload.path={tmp_path}/tables.csv")
    assert ended.code == 1
    assert text in ended.err
    assert ended.err.count("\n") == 1


def test_a_bare_task_is_an_override():
    assert [as_override(task) for task in Task.__members__] == [f"task={task}" for task in Task.__members__]
    assert as_override("num_gpus=8") == "num_gpus=8"


def test_simulate_imports_no_torch():
    code = (
        "import sys; sys.argv = ['simulate', 'num_gpus=256']\n"
        "from sparse2d import simulate\n"
        "from sparse2d.cli import run_entry_point\n"
        "run_entry_point('simulate', simulate.SimulateConfig, simulate.main)\n"
        "heavy = {'torch', 'torchrec', 'pandas', 'scipy', 'wandb'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_recommendation_is_the_best_of_all_layouts_that_fit(simulate_config):
    config = simulate_config("num_gpus=1024")
    tables = make_workload(config.workload)
    winner = best(config, tables, PLACEMENTS)
    tried = list(choices(config, tables, PLACEMENTS))
    assert winner.qps == max(choice.prediction.qps for choice in tried if not choice.prediction.oom)
    assert not winner.prediction.oom
    assert {choice.num_groups for choice in tried} <= set(divisors(1024)) == {2**k for k in range(11)}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    # K is the options', and the best row of each other K is told.
    rows = [
        {"sync_interval": interval, "num_groups": num_groups, "qps": factor * winner.qps, "oom": oom}
        for interval, num_groups, factor, oom in [
            (1, 4, 1, False),
            (4, 8, 1.5, False),
            (4, 4, 1.2, False),
            (4, 2, 9, True),
        ]
    ]
    told = reasons(winner, tables, tried, rows)
    assert f"best M = {winner.num_groups} at K = 1, placement " in told[0]
    assert [line.split("; ")[1] for line in told if "sync.interval" in line] == ["K = 4: 1.50 x that with M = 8"]


def test_fingerprints_tell_predictions_apart_and_nothing_else(simulate_config):
    config = simulate_config(*SMALL)
    same = simulate_config(*SMALL, "results_dir=x", "task=sweep", "table=y")
    assert fingerprint(config) == fingerprint(same)
    assert fingerprint(config) != fingerprint(simulate_config(*SMALL, "hardware.nic_gb_per_s=49"))


def test_same_seed_same_tables_other_seed_other_tables(simulate_config):
    def digest(*overrides: str) -> str:
        return make_workload(simulate_config("workload=exfm_like", *overrides).workload).digest

    assert digest() == digest()
    assert digest() != digest("workload.generated.seed=1")
    tables = make_workload(simulate_config("workload=exfm_like").workload)
    assert tables.table_bytes.sum() == pytest.approx(1.7e12, rel=1e-3)
    assert len(tables.rows) == 1000
