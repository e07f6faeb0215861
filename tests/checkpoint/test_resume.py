"""Resumed on the same layout: bit for bit as if nothing had happened. On another one: the same weights and moments."""

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import CheckpointedResult, CheckpointedRun, train_with_checkpoints
from configs import tiny_overrides, tiny_train

from sparse2d.config import (
    AveragingCompressionConfig,
    AveragingMethod,
    Combine,
    DenseCompressionConfig,
    DenseMethod,
    DenseOptimizer,
    ParallelismKind,
    ShardingKind,
    SyncMoments,
    SyncRows,
    TableOptimizer,
    TrainConfig,
    ValueDtype,
)
from sparse2d.errors import UserError
from sparse2d.launch import run_ranks

STEPS, SAVED = 10, 4
# One moment for each row, and two for each element.
OPTIMIZERS = [TableOptimizer.rowwise_adagrad, TableOptimizer.adam]


def two_d(folder: Path, interval: int = 1, num_ranks: int = 4, **options) -> TrainConfig:
    return tiny_train(
        folder, ParallelismKind.sparse_2d, num_ranks=num_ranks, num_groups=2, interval=interval, **options
    )


def train(runs: list[CheckpointedRun], dataset: Path) -> list[CheckpointedResult]:
    return run_ranks(train_with_checkpoints, runs, dataset, num_ranks=runs[0].config.launch.num_ranks)


def straight_and_resumed(config: TrainConfig, folder: Path) -> list[CheckpointedRun]:
    """Ten steps; four steps, a checkpoint and one step more; resumed from it, the other six."""
    config.checkpoint.interval = SAVED
    runs = [("straight", STEPS), ("stopped", SAVED + 1), ("stopped", STEPS)]
    return [CheckpointedRun(config, folder / name, stop) for name, stop in runs]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str = "") -> None:
    assert one.keys() == other.keys(), what
    assert [key for key in one if not torch.equal(one[key], other[key])] == [], what


def assert_same_tables(one: CheckpointedResult, other: CheckpointedResult, what: str) -> None:
    assert len(one.tables) == len(other.tables)
    for first, second in zip(one.tables, other.tables, strict=True):
        assert_equal(first, second, what)
    for first, second in zip(one.moments, other.moments, strict=True):
        for first_moment, second_moment in zip(first, second, strict=True):
            assert_equal(first_moment, second_moment, what)
    assert one.iterations == other.iterations
    assert_equal(one.dense, other.dense, what)
    assert_equal(one.dense_moments, other.dense_moments, what)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_4_steps_resumed_and_6_more_equal_10_straight(optimizer, tmp_path, tiny_dataset):
    layouts = {
        "full_mp": tiny_train(tmp_path, num_ranks=4),
        "2d": two_d(tmp_path),
        "2d, saved at an averaging, moments on their way": two_d(tmp_path, 4, moments=SyncMoments.delayed),
        "2d, saved between averagings": two_d(tmp_path, 3),
        "2d, gradients averaged": two_d(tmp_path),
        "dense gradients compressed": tiny_train(tmp_path, num_ranks=4),
        "dense gradients of low rank": tiny_train(tmp_path, num_ranks=4),
        "2d, averaging compressed": two_d(tmp_path),
    }
    layouts["dense gradients of low rank"].compression.dense = DenseCompressionConfig(method=DenseMethod.powersgd)
    layouts["2d, averaging compressed"].compression.averaging = AveragingCompressionConfig(
        method=AveragingMethod.dct, density=0.1, lifetime=3
    )
    layouts["2d, averaging compressed"].sync.rows = SyncRows.touched
    layouts["dense gradients compressed"].compression.dense = DenseCompressionConfig(
        method=DenseMethod.dct, density=0.05, lifetime=3, value_dtype=ValueDtype.bf16
    )
    layouts["2d, gradients averaged"].sync.combine = Combine.gradient
    for config in layouts.values():
        config.optimizer.name = optimizer
        config.optimizer.dense.name = DenseOptimizer.adam
        config.log_every = 3
    # All on the same ranks, which take longer to start than to train.
    runs = [run for name, config in layouts.items() for run in straight_and_resumed(config, tmp_path / name)]
    results = iter(train(runs, tiny_dataset))
    for name, straight, stopped, resumed in zip(layouts, results, results, results, strict=True):
        assert (straight.resumed_step, stopped.resumed_step, resumed.resumed_step) == (0, 0, SAVED)
        assert_same_tables(straight, resumed, name)
        assert set(resumed.iterations.values()) == {STEPS}
        # Steps 4 to 6 make one point: its first step is of the run that was stopped.
        assert resumed.points == [point for point in straight.points if point["step"] > SAVED], name
        # Each rank drew from generators of its own seed, and goes on where it was.
        assert resumed.draws == straight.draws
        assert len(set(resumed.draws)) == 4
        assert [window["losses"].tolist() for window in resumed.window] == [
            window["losses"].tolist() for window in straight.window
        ]
        # The comparison means something only if the steps after the checkpoint change things.
        assert any(not torch.equal(stopped.tables[0][table], resumed.tables[0][table]) for table in stopped.tables[0])


LOADED = {
    "2 x 4": (8, ParallelismKind.sparse_2d, 2, [ShardingKind.row_wise]),
    "2": (2, ParallelismKind.full_mp, 1, [ShardingKind.column_wise]),
    "1": (1, ParallelismKind.full_mp, 1, [ShardingKind.table_wise]),
    "full_mp on 4": (4, ParallelismKind.full_mp, 1, [ShardingKind.table_wise]),
    "data_parallel on 2": (2, ParallelismKind.data_parallel, 1, None),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_saved_on_2_x_2_loads_into_every_layout(tmp_path, tiny_dataset):
    """And from data parallel back into 2 x 2."""

    def configured(kind: ParallelismKind, num_ranks: int, num_groups: int, sharding, optimizer) -> TrainConfig:
        config = tiny_train(
            tmp_path,
            kind,
            num_ranks=num_ranks,
            num_groups=num_groups,
            sharding=sharding,
            optimizer=optimizer,
            dense=DenseOptimizer.adam,
            save_every=SAVED,
        )
        # A multiple of eight ranks.
        config.global_batch_size = 120
        return config

    def train_each(layout: tuple, name: str, resume: str | None, stops: list[int]) -> dict[TableOptimizer, list]:
        """Under each optimizer, all on the same ranks: as far as each of ``stops``, resumed from a folder."""
        num_ranks, kind, num_groups, sharding = layout
        runs = []
        for optimizer in OPTIMIZERS:
            config = configured(kind, num_ranks, num_groups, sharding, optimizer)
            config.checkpoint.resume = "auto" if resume is None else str(tmp_path / optimizer.name / resume)
            runs += [CheckpointedRun(config, tmp_path / optimizer.name / name, stop) for stop in stops]
        results = iter(train(runs, tiny_dataset))
        return {optimizer: [next(results) for _ in stops] for optimizer in OPTIMIZERS}

    two_by_two = (4, ParallelismKind.sparse_2d, 2, [ShardingKind.table_wise, ShardingKind.row_wise])
    saved = train_each(two_by_two, "saved", None, [SAVED])
    for name, layout in LOADED.items():
        stops = [SAVED, 2 * SAVED] if layout[1] is ParallelismKind.data_parallel else [SAVED]
        for optimizer, (loaded, *trained) in train_each(layout, name, "saved", stops).items():
            assert_same_in_another_layout(loaded, saved[optimizer][0], name)
            if trained:
                (moved,) = trained
                assert moved.resumed_step == SAVED
                assert not torch.equal(moved.tables[0]["t_C1"], loaded.tables[0]["t_C1"])
                saved[optimizer].append(moved)
    for optimizer, (back,) in train_each(two_by_two, "back", "data_parallel on 2", [2 * SAVED]).items():
        moved = saved[optimizer][1]
        assert_equal(back.tables[1], moved.tables[0])
        for moment, expected in zip(back.moments[1], moved.moments[0], strict=True):
            assert_equal(moment, expected)


def assert_same_in_another_layout(loaded: CheckpointedResult, saved: CheckpointedResult, name: str) -> None:
    assert all(weight.isfinite().all() for weight in saved.tables[0].values())
    assert loaded.resumed_step == SAVED
    for tables, moments in zip(loaded.tables, loaded.moments, strict=True):
        assert_equal(tables, saved.tables[0], name)
        assert [len(moment) for moment in moments] == [len(moment) for moment in saved.moments[0]]
        for moment, expected in zip(moments, saved.moments[0], strict=True):
            assert_equal(moment, expected, name)
    assert set(loaded.iterations.values()) == {SAVED}
    assert_equal(loaded.dense, saved.dense, name)
    assert_equal(without_module(loaded.dense_moments), without_module(saved.dense_moments), name)
    assert any(name.endswith("/exp_avg_sq") and value.any() for name, value in loaded.dense_moments.items())


def without_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``DistributedDataParallel`` does not name them, which not every layout has."""
    return {name.replace("module.", ""): value for name, value in tensors.items()}


def test_what_replicas_and_columns_do_not_share_is_averaged_in_another_layout(tmp_path, tiny_dataset):
    """Saved between averagings and with column-wise shards, whose row-wise moments differ."""
    options = {"optimizer": TableOptimizer.rowwise_adagrad, "dense": DenseOptimizer.adam}
    saved = two_d(tmp_path, interval=3, sharding=[ShardingKind.column_wise], save_every=SAVED, **options)
    (before,) = train([CheckpointedRun(saved, tmp_path / "saved", SAVED)], tiny_dataset)
    config = tiny_train(tmp_path, num_ranks=2, sharding=[ShardingKind.table_wise], save_every=SAVED, **options)
    config.checkpoint.resume = str(tmp_path / "saved")
    (loaded,) = train([CheckpointedRun(config, tmp_path / "loaded", SAVED)], tiny_dataset)
    for table in before.tables[0]:
        copies = torch.stack([tables[table] for tables in before.tables])
        assert not torch.equal(copies[0], copies[1])
        torch.testing.assert_close(loaded.tables[0][table], copies.mean(dim=0), rtol=0, atol=1e-7)
        # One column-wise shard of eight columns is split in two: their moments differ, the row's is their mean.
        moments = torch.stack([moments[0][table] for moments in before.moments])
        assert not torch.equal(moments[0][:, 0], moments[0][:, -1])
        expected = moments.mean(dim=0).mean(dim=1, keepdim=True).expand(-1, 8)
        torch.testing.assert_close(loaded.moments[0][0][table], expected, rtol=1e-6, atol=1e-9)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, tiny_dataset):
    config = tiny_train(tmp_path, num_ranks=1, optimizer=TableOptimizer.adam, save_every=SAVED)
    run = CheckpointedRun(config, tmp_path / "run", STEPS)
    (straight,) = train([run], tiny_dataset)
    newest, before = sorted((tmp_path / "run").glob("step-*"), reverse=True)
    assert (int(newest.name[5:]), int(before.name[5:])) == (2 * SAVED, SAVED)
    payload = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    (resumed,) = train([run], tiny_dataset)
    assert resumed.resumed_step == SAVED
    assert_same_tables(straight, resumed, "")


def test_a_checkpoint_of_something_else_is_refused(tmp_path, tiny_dataset, program):
    saved = tiny_train(tmp_path, num_ranks=1, save_every=SAVED)
    train([CheckpointedRun(saved, tmp_path / "saved", SAVED)], tiny_dataset)

    def refused(text: str, **changes) -> None:
        config = tiny_train(tmp_path, num_ranks=1, save_every=SAVED)
        config.checkpoint.resume = str(tmp_path / "saved")
        for path, value in changes.items():
            *owners, name = path.split("__")
            owner = config
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, name, value)
        with pytest.raises(UserError, match=text):
            train([CheckpointedRun(config, tmp_path / "loaded", STEPS)], tiny_dataset)

    refused("has global_batch_size=60, this run 120: step 4 would be at other rows", global_batch_size=120)
    refused(r"table t_C1 is \[40, 8\] there and \[40, 16\] here", model__embedding_dim=16, model__dense_arch=[16, 16])
    refused("holds the state of .*'sgd'.*, this run needs .*'adam'", optimizer__dense__name=DenseOptimizer.adam)
    refused("no checkpoint there; give a step-", checkpoint__resume=str(tmp_path))
    # One of a later step is refused before any rank starts.
    beyond = ["max_steps=3", f"checkpoint.resume={tmp_path / 'saved'}"]
    ended = program("train", *tiny_overrides(tmp_path / "results", tiny_dataset.parent), *beyond)
    assert "step-00000004 is of step 4, beyond the 3 steps of this run: raise max_steps" in ended.err
    assert not (tmp_path / "results").exists()
