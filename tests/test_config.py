"""The files under conf/ against the declarations, and options that contradict each other."""

import shutil
from pathlib import Path

import pytest
from configs import experiments_of
from hydra.errors import HydraException
from omegaconf import OmegaConf

from sparse2d.config import (
    ParallelismKind,
    TableOptimizer,
    check_train,
    conf_dir,
    settle,
)
from sparse2d.errors import UserError
from sparse2d.records import fingerprint

GROUPS = sorted(
    (folder.name, path.stem)
    for folder in conf_dir().iterdir()
    if folder.is_dir() and folder.name not in ("experiment", "local", "workload", "hardware", "constants")
    for path in folder.glob("*.yaml")
)
EXPERIMENTS = experiments_of("train")


def test_defaults_are_complete_and_pass(composed, train_config):
    assert OmegaConf.missing_keys(composed("train")) == set()
    check_train(train_config())


@pytest.mark.parametrize(("group", "name"), GROUPS)
def test_every_choice_composes_and_passes(group, name, composed, train_config):
    if name == "slurm":
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")
    config = composed("train", f"{group}={name}")
    assert OmegaConf.missing_keys(config) == set()
    # Averaging belongs to 2D.
    averages = group == "sync" or name.startswith("averaging")
    check_train(train_config(f"{group}={name}", *(["parallelism=sparse_2d"] if averages else [])))


@pytest.mark.parametrize(("group", "name"), [pair for pair in GROUPS if pair[0] == "data"])
def test_preprocess_takes_the_same_data(group, name, composed, train_config):
    prepared = OmegaConf.to_object(composed("preprocess", f"{group}={name}"))
    assert prepared.data == train_config(f"{group}={name}").data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_under_its_own_name(name, train_config):
    config = train_config(f"experiment={name}")
    check_train(config)
    assert config.experiment == name


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("train.yaml", "log_evry: 5"),
        ("optimizer/sgd.yaml", "lrr: 1.0"),
        ("data/criteo_kaggle.yaml", "eval_row: 5"),
        ("parallelism/sparse_2d.yaml", "group_size: 4"),
    ],
)
def test_files_cannot_hold_undeclared_keys(file, line, composed, tmp_path):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    path = tmp_path / "conf" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    choices = [file.removesuffix(".yaml").replace("/", "=")] if "/" in file else []
    with pytest.raises(HydraException, match=line.split(":")[0]):
        composed("train", *choices, config_dir=tmp_path / "conf")


def test_experiment_files_cannot_hold_undeclared_keys(composed, tmp_path):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    Path(tmp_path / "conf" / "experiment" / "odd.yaml").write_text("# @package _global_\nsync:\n  intervall: 3\n")
    with pytest.raises(HydraException, match="intervall"):
        composed("train", "experiment=odd", config_dir=tmp_path / "conf")


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1", 1.0), ("2.5E-3", 0.0025), ("1.", 1.0)])
def test_learning_rates_are_floats_however_they_are_written(text, value, train_config):
    lr = train_config(f"optimizer.lr={text}").optimizer.lr
    assert (lr, type(lr)) == (value, float)


def test_one_moment_scale_has_one_fingerprint(train_config):
    base = "optimizer=momentum_scaled_rowwise_adagrad"
    prints = {
        scale: fingerprint(train_config(base, f"optimizer.moment_scale={scale}"), "0" * 64)
        for scale in ("4", "4.0", "4e0", "auto", "2")
    }
    assert prints["4"] == prints["4.0"] == prints["4e0"]
    assert len(set(prints.values())) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compression=dct_dp", "compression.dense.density=0"], r"dense\.density=0 must be in \(0, 1\]: the share"),
        (["compression=dct_mp", "compression.lookup.density=1.5"], r"lookup\.density=1\.5 must be in \(0, 1\]"),
        (["compression=dct_dp", "compression.dense.density=nan"], r"dense\.density=nan must be in \(0, 1\]"),
        (["compression=dct_dp", "compression.dense.lifetime=0"], r"dense\.lifetime=0 must be at least 1"),
        (["compression=dct_dp", "compression.dense.warmup_steps=-1"], r"dense\.warmup_steps=-1 must be at least 0"),
        (["compression=powersgd", "compression.dense.rank=0"], r"dense\.rank=0 must be at least 1"),
        (["compression.dense.density=0.1"], r"dense\.density=0\.1 has no effect with .*dense\.method=none"),
        (["compression=topk", "compression.dense.lifetime=5"], r"lifetime=5 has no effect with .*method=topk"),
        (["compression=bf16", "compression.dense.value_dtype=fp16"], r"value_dtype=fp16 has no effect with .*=bf16"),
        (["compression=averaging_dct"], r"averaging\.method=dct needs parallelism=sparse_2d; full_mp averages nothing"),
        (
            ["compression=averaging_dct", "parallelism=sparse_2d", "sync.combine=delta_sum"],
            r"averaging\.method=dct needs sync\.combine=mean, not delta_sum",
        ),
        (
            ["compression=averaging_dct", "parallelism=sparse_2d", "optimizer=adam"],
            r"averaging\.method=dct needs sync\.moments=never with optimizer=adam",
        ),
        (
            ["compression=averaging_dct", "parallelism=sparse_2d", "sync.moments=delayed"],
            r"averaging\.method=dct needs sync\.moments=with_weights or never, not delayed",
        ),
        (
            ["compression=dct_mp", "parallelism=data_parallel"],
            r"lookup\.method=dct needs parallelism=full_mp or sparse_2d; data_parallel sends no pooled",
        ),
        (["compression=dct_dp", "engine=emulated"], r"engine=emulated sends nothing that could be compressed"),
        (["global_batch_size=0"], r"global_batch_size=0 must be at least 1"),
        (["eval_batch_size=-2"], r"eval_batch_size=-2 must be at least 1"),
        (["log_every=0"], r"log_every=0 must be at least 1"),
        (["max_steps=0"], r"max_steps=0 must be at least 1"),
        (["optimizer.beta1=1"], r"optimizer\.beta1=1\.0 must be in \[0, 1\)"),
        (["optimizer.beta2=-0.5"], r"optimizer\.beta2=-0\.5 must be in \[0, 1\)"),
        (["sync.interval=0"], r"sync\.interval=0 must be at least 1"),
        (["launch.num_ranks=0"], r"launch\.num_ranks=0 must be at least 1"),
        (["launch.threads_per_rank=0"], r"launch\.threads_per_rank=0 must be at least 1"),
        (["parallelism.num_groups=0"], r"parallelism\.num_groups=0 must be at least 1"),
        (["data.train_rows=0"], r"data\.train_rows=0 must be at least 1"),
        (["data.eval_rows=0"], r"data\.eval_rows=0 must be at least 1"),
        (["seed=-1"], r"seed=-1 must be in \[0, 2\*\*32\)"),
        (["seed=4294967296"], r"seed=4294967296 must be in"),
        (["global_batch_size=513"], r"=513 is not divisible by launch\.num_ranks=8; use 512 or 520"),
        (["global_batch_size=5"], r"=5 is not divisible by launch\.num_ranks=8; use 8$"),
        (
            ["parallelism=sparse_2d", "parallelism.num_groups=3"],
            r"num_ranks=8 is not divisible by parallelism\.num_groups=3; choose M from \[1, 2, 4, 8\]",
        ),
        (["parallelism.num_groups=2"], r"num_groups=2 needs parallelism=sparse_2d; full_mp has one group"),
        (
            ["parallelism=data_parallel", "parallelism.num_groups=8"],
            r"num_groups=8 needs parallelism=sparse_2d; data_parallel has one group",
        ),
        (
            ["parallelism.ranks_per_host=3"],
            r"num_ranks=8 is not divisible by .*ranks_per_host=3; choose from \[1, 2, 4, 8\]",
        ),
        (["parallelism.ranks_per_host=0"], r"ranks_per_host=0 must be at least 1"),
        (["frequency_bins=[1,2]"], r"frequency_bins=\[1, 2\] must begin with 0 and rise"),
        (["frequency_bins=[0,4,2]"], r"frequency_bins=\[0, 4, 2\] must begin with 0 and rise"),
        (["plan_out=plan.json"], r"plan_out=plan\.json has no effect without plan_only=true"),
        (["parallelism.sharding=[]"], r"sharding is empty; name at least one of \['table_wise', 'row_wise'"),
        (["model.embedding_dim=6"], r"embedding_dim=6 must be a positive multiple of 4"),
        (["model.embedding_dim=0"], r"embedding_dim=0 must be a positive multiple of 4"),
        (["model.embedding_dim=32"], r"dense_arch=\[64, 16\] must end with model\.embedding_dim=32"),
        (["model.dense_arch=[]"], r"dense_arch=\[\] must end with model\.embedding_dim=16"),
        (["model.over_arch=[64,2]"], r"over_arch=\[64, 2\] must end with 1"),
        (["model.over_arch=[0,1]"], r"at least 1: dense_arch=\[64, 16\], over_arch=\[0, 1\]"),
        (["optimizer.lr=-0.1"], r"optimizer\.lr=-0\.1 must be a finite number >= 0"),
        (["optimizer.lr=nan"], r"optimizer\.lr=nan must be a finite"),
        (["optimizer.dense.lr=inf"], r"optimizer\.dense\.lr=inf must be a finite"),
        (["optimizer.eps=0"], r"optimizer\.eps=0\.0 must be a finite number > 0"),
        (["optimizer.dense.eps=nan"], r"optimizer\.dense\.eps=nan must be a finite"),
        (["optimizer.moment_scale=auto"], r"=auto needs optimizer=momentum_scaled.*, not rowwise_adagrad"),
        (["optimizer=sgd", "optimizer.moment_scale=4"], r"=4\.0 needs optimizer=momentum_scaled.*, not sgd"),
        (["optimizer.moment_scale=M"], r"moment_scale=M must be auto or a finite number > 0"),
        (["optimizer.moment_scale=0"], r"moment_scale=0\.0 must be auto or a finite number > 0"),
        (["optimizer.moment_scale=nan"], r"moment_scale=nan must be auto or a finite number > 0"),
        (["engine=emulated", "parallelism=data_parallel"], r"engine=emulated needs parallelism=full_mp or sparse_2d"),
        (
            ["engine=emulated", "parallelism=sparse_2d", "sync.rows=touched"],
            r"sync\.rows=touched has no effect with engine=emulated; leave it at auto",
        ),
        (
            ["engine=emulated", "parallelism=sparse_2d", "sync.wire_dtype=bf16"],
            r"sync\.wire_dtype=bf16 has no effect with engine=emulated; leave it at fp32",
        ),
        (["engine=emulated", "pipeline=sparse_dist"], r"pipeline=sparse_dist has no effect with engine=emulated"),
        (["engine=emulated", "checkpoint.resume=somewhere"], r"engine=emulated reads no checkpoints"),
    ],
)
def test_contradictions_are_refused_with_their_numbers(overrides, message, train_config):
    with pytest.raises(UserError, match=message) as raised:
        check_train(train_config(*overrides))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
@pytest.mark.parametrize("optimizer", list(TableOptimizer))
def test_every_divisor_of_the_ranks_is_a_number_of_groups(num_groups, optimizer, train_config):
    check_train(
        train_config("parallelism=sparse_2d", f"parallelism.num_groups={num_groups}", f"optimizer={optimizer.name}")
    )


def test_layouts_are_chosen_by_their_group(train_config):
    for kind in ParallelismKind:
        assert train_config(f"parallelism={kind.name}").parallelism.kind is kind


@pytest.mark.parametrize(
    ("option", "named"),
    [("sync=local_sgd", "interval=16"), ("sync.moments=never", "moments=never"), ("sync.rows=all", "rows=all")],
)
def test_averaging_is_for_2d_only(option, named, train_config):
    with pytest.raises(UserError, match=rf"sync.{named} needs parallelism=sparse_2d; data_parallel averages"):
        check_train(train_config(option, "parallelism=data_parallel"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["sync.combine=touch_mean", "sync.rows=all"], r"touch_mean needs sync\.rows=touched or auto"),
        (["sync.combine=delta_sum", "sync.moments=never"], r"delta_sum needs sync\.moments=with_weights, not never"),
        (["sync.combine=merged_gradient", "optimizer=adam"], r"needs optimizer=rowwise_adagrad or adagrad .* not adam"),
        (["sync.combine=gradient", "sync.interval=2"], r"gradient needs sync\.interval=1"),
        (
            ["sync.combine=gradient", "sync.wire_dtype=bf16"],
            r"gradient needs sync\.interval=1 and sync\.wire_dtype=fp32",
        ),
        (
            ["sync.combine=delta_sum", "optimizer=momentum_scaled_rowwise_adagrad"],
            r"delta_sum needs optimizer\.moment_scale=1 \(optimizer=rowwise_adagrad\), not auto",
        ),
    ],
)
def test_rules_are_refused_where_they_mean_nothing(options, text, train_config):
    with pytest.raises(UserError, match=text):
        check_train(train_config("parallelism=sparse_2d", *options))


def test_all_rows_are_not_sent_as_bf16(train_config):
    with pytest.raises(UserError, match=r"needs sync\.rows=touched or auto"):
        check_train(train_config("parallelism=sparse_2d", "sync.wire_dtype=bf16", "sync.rows=all"))


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ([], "merged_gradient"),
        (["optimizer=adagrad", "sync.wire_dtype=bf16"], "merged_gradient"),
        (["sync.interval=4"], "touch_mean"),
        (["optimizer=adam"], "touch_mean"),
        (["optimizer=adam", "sync.interval=4"], "touch_mean"),
        (["sync.combine=mean"], "mean"),
        (["sync.combine=delta_sum"], "delta_sum"),
        # Each of these is made for the mean, or needs it.
        (["optimizer=sgd"], "mean"),
        (["optimizer=momentum_scaled_rowwise_adagrad"], "mean"),
        (["optimizer=momentum_scaled_rowwise_adagrad", "optimizer.moment_scale=4"], "mean"),
        (["sync.rows=all"], "mean"),
        (["sync.moments=delayed"], "mean"),
        (["compression=averaging_dct"], "mean"),
        (["parallelism.num_groups=1"], "mean"),
        (["parallelism=full_mp"], "mean"),
    ],
)
def test_the_default_rule_of_2d_follows_optimizer_and_interval(overrides, rule, train_config):
    config = train_config("parallelism=sparse_2d", *overrides)
    check_train(config)
    settle(config)
    assert config.sync.combine.name == rule
    check_train(config)
