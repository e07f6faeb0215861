"""What is averaged, when, and as what: real ranks against the algorithm in one process."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np
import pytest
import torch
from one_process import expected
from ranks import Stepped, TableRun, step_tables

from sparse2d.config import (
    AveragingCompressionConfig,
    AveragingMethod,
    Combine,
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    ShardingKind,
    SyncConfig,
    SyncMoments,
    SyncRows,
    TableOptimizer,
    ValueDtype,
    WireDtype,
)
from sparse2d.launch import run_ranks

C = TypeVar("C")
# Few rows of the first table are touched at a time, all rows of the second.
SHAPES = {"t_large": (600, 8), "t_small": (9, 8)}
BATCH, IDS_PER_BAG = 4, 3
ADAGRAD = OptimizerConfig(TableOptimizer.momentum_scaled_rowwise_adagrad, lr=0.5, eps=0.1, moment_scale="auto")
ADAM = OptimizerConfig(TableOptimizer.adam, lr=0.1, eps=0.1)


def make_run(
    sync: SyncConfig,
    *,
    optimizer: OptimizerConfig = ADAGRAD,
    sharding: ShardingKind = ShardingKind.table_wise,
    steps: int = 9,
    num_ranks: int = 4,
    num_groups: int = 2,
) -> TableRun:
    rng = np.random.default_rng(0)
    limits = np.array([rows for rows, _ in SHAPES.values()])[:, None]
    ids = rng.integers(0, limits, (steps, num_ranks, len(SHAPES), BATCH * IDS_PER_BAG))
    factors = rng.normal(size=(steps, num_ranks, BATCH, sum(dim for _, dim in SHAPES.values()))).astype(np.float32)
    layout = ParallelismConfig(kind=ParallelismKind.sparse_2d, num_groups=num_groups, sharding=[sharding])
    return TableRun(SHAPES, layout, optimizer, sync, ids, factors)


def step(runs: list[TableRun], num_ranks: int = 4) -> list[Stepped]:
    return run_ranks(step_tables, runs, num_ranks=num_ranks)


def step_each(cases: dict[C, list[TableRun]]) -> Iterator[tuple[C, list[Stepped]]]:
    """Each case with what its runs leave behind; all on the same ranks, which take longer to start than to train."""
    results = iter(step([run for runs in cases.values() for run in runs]))
    return ((case, list(islice(results, len(runs)))) for case, runs in cases.items())


def assert_close(one: Stepped, other: Stepped, tolerance: float = 1e-6) -> None:
    for table in SHAPES:
        torch.testing.assert_close(one.tables[table], other.tables[table], atol=tolerance, rtol=0)
    for a, b in zip(one.moments, other.moments, strict=True):
        for table in SHAPES:
            torch.testing.assert_close(a[table], b[table], atol=tolerance, rtol=1e-5)


def bit_equal(one: Stepped, other: Stepped) -> bool:
    pairs = zip([one.tables, *one.moments], [other.tables, *other.moments], strict=True)
    return all(torch.equal(a[table], b[table]) for a, b in pairs for table in SHAPES)


@pytest.mark.parametrize("kinds", [list(ShardingKind)[:3], list(ShardingKind)[3:]], ids=str)
def test_touched_rows_equal_all_rows_after_50_steps(kinds):
    """K = 1 and 4, 2 groups of 2 and 4 of 1; ids of both tables repeat between ranks."""
    runs = {
        sharding: [
            make_run(
                SyncConfig(interval=interval, rows=rows),
                optimizer=optimizer,
                sharding=sharding,
                steps=50,
                num_groups=num_groups,
            )
            for interval, optimizer, num_groups in ((1, ADAGRAD, 2), (4, ADAGRAD, 2), (4, ADAM, 4))
            for rows in (SyncRows.touched, SyncRows.all)
        ]
        for sharding in kinds
    }
    for sharding, results in step_each(runs):
        for touched, all_rows in zip(results[::2], results[1::2], strict=True):
            assert (touched.tables["t_large"] - touched.before["t_large"]).abs().max() > 1e-2, sharding
            assert_close(touched, all_rows)
        assert results[0].replicas_equal, sharding


def test_moments_follow_their_formula():
    runs = [
        make_run(SyncConfig(interval=interval, rows=rows, moments=moments), optimizer=optimizer)
        for rows in SyncRows
        for moments in SyncMoments
        for interval, optimizer in ((1, ADAM), (3, ADAGRAD))
    ]
    for run, result in zip(runs, step(runs), strict=True):
        for table in SHAPES:
            want = expected(run, result.before[table], table, 4)
            torch.testing.assert_close(result.tables[table], want.weight, atol=1e-6, rtol=0)
            for number, moment in enumerate(result.moments):
                torch.testing.assert_close(moment[table], want.moments[number], atol=1e-6, rtol=1e-5)
        assert not result.unequal_weights
        assert result.replicas_equal == (run.sync.moments is SyncMoments.with_weights)


def test_delayed_moments_of_rows_that_rest_are_bit_equal():
    """Only row 0 is looked up after step 3, so three averagings later it alone has a correction on its way."""
    run = make_run(SyncConfig(moments=SyncMoments.delayed, rows=SyncRows.touched), num_groups=4, steps=6)
    run.ids[3:] = 0
    result = step([run])[0]
    assert not result.unequal_weights
    assert result.unequal_moments == {(table, 0) for table in SHAPES}


def test_bf16_sends_changes_in_half_the_bytes():
    plain, half = (
        make_run(SyncConfig(rows=SyncRows.touched, wire_dtype=dtype, interval=3), steps=9) for dtype in WireDtype
    )
    exact, rounded = step([plain, half])
    assert rounded.replicas_equal
    assert not bit_equal(exact, rounded)
    for table in SHAPES:
        change = (exact.tables[table] - exact.before[table]).abs().max()
        # Three averagings, each rounding a change twice to 8 bits.
        assert (exact.tables[table] - rounded.tables[table]).abs().max() < 3 * 2 * 2**-8 * change
    # Keys are sent as they are in both.
    for full, less in zip(exact.payload_bytes, rounded.payload_bytes, strict=True):
        assert 0.45 < less / full < 0.6


def test_auto_takes_what_sends_fewer_bytes():
    touched, all_rows, auto = (
        make_run(SyncConfig(rows=rows)) for rows in (SyncRows.touched, SyncRows.all, SyncRows.auto)
    )
    large, small = (
        replace(run, shapes={name: SHAPES[name]}, ids=run.ids[:, :, i : i + 1], factors=run.factors[..., :8])
        for i, (run, name) in enumerate(((auto, "t_large"), (auto, "t_small")))
    )
    results = step([touched, all_rows, auto, large, small])
    means = [np.mean(result.payload_bytes[1:]) for result in results]
    assert means[2] <= min(means[:2])
    # A table of which most rows are touched is averaged whole, without any keys.
    assert results[4].payload_bytes[1] == 9 * (8 + 1) * 4
    assert means[3] < 600 * (8 + 1) * 4 / 3


def test_a_new_averager_goes_on_from_the_state_of_the_old_one():
    """In the middle of an interval, too: what was touched before counts at the next averaging."""
    options = [
        SyncConfig(interval=4, rows=SyncRows.touched),
        SyncConfig(interval=4, rows=SyncRows.auto, wire_dtype=WireDtype.bf16),
        SyncConfig(interval=2, rows=SyncRows.touched, moments=SyncMoments.delayed),
        SyncConfig(interval=2, rows=SyncRows.all, moments=SyncMoments.delayed),
    ]
    runs = {str(sync): make_run(sync, num_groups=4) for sync in options}
    cases = {sync: [run, *(replace(run, restart_at=step) for step in (4, 5, 6))] for sync, run in runs.items()}
    for sync, (straight, *restarted) in step_each(cases):
        for result in restarted:
            assert bit_equal(straight, result), sync


def test_rules_equal_the_algorithm_in_one_process():
    """Every rule on real ranks, replicas bit-equal after each averaging, with K = 1 and 3 where the rule allows it."""
    rowwise = OptimizerConfig(TableOptimizer.rowwise_adagrad, lr=0.5, eps=0.1)
    rules = [Combine.delta_sum, Combine.merged_gradient, Combine.touch_mean, Combine.gradient]
    elementwise = OptimizerConfig(TableOptimizer.adagrad, lr=0.5, eps=0.1)
    runs = [
        make_run(SyncConfig(combine=rule, interval=interval), optimizer=optimizer, sharding=sharding, num_groups=groups)
        for rule in rules
        for interval in ((1,) if rule is Combine.gradient else (1, 3))
        for optimizer, sharding, groups in (
            (rowwise, ShardingKind.row_wise, 2),
            (rowwise, ShardingKind.column_wise, 4),
            (elementwise if rule is Combine.merged_gradient else ADAM, ShardingKind.table_wise, 2),
        )
    ]
    for run, result in zip(runs, step(runs), strict=True):
        assert result.replicas_equal
        for table in SHAPES:
            want = expected(run, result.before[table], table, 4)
            torch.testing.assert_close(result.tables[table], want.weight, atol=1e-6, rtol=0)
            for number, moment in enumerate(result.moments):
                torch.testing.assert_close(moment[table], want.moments[number], atol=1e-6, rtol=1e-5)


def test_shards_without_a_touched_row_stay_as_they_are():
    """All ids are 0, so that the second rank of each group, which has the later rows, gets none."""
    cases = {
        (rule, name): [
            make_run(
                SyncConfig(combine=rule),
                optimizer=OptimizerConfig(name, lr=0.1),
                sharding=ShardingKind.row_wise,
                steps=2,
            )
        ]
        for rule in Combine
        for name in TableOptimizer
        if rule is not Combine.auto
        and name.name != "momentum_scaled_rowwise_adagrad"
        and (rule is not Combine.merged_gradient or name.name.endswith("adagrad"))
    }
    for (run,) in cases.values():
        run.ids[:] = 0
    for case, (result,) in step_each(cases):
        for table in SHAPES:
            assert torch.equal(result.tables[table][1:], result.before[table][1:]), case
            assert not torch.equal(result.tables[table][0], result.before[table][0]), case


def test_changes_of_delta_sum_travel_as_bf16():
    exact, rounded = step(
        [make_run(SyncConfig(combine=Combine.delta_sum, wire_dtype=dtype), optimizer=ADAM) for dtype in WireDtype]
    )
    assert rounded.replicas_equal
    for table in SHAPES:
        change = (exact.tables[table] - exact.before[table]).abs().max()
        assert 0 < (exact.tables[table] - rounded.tables[table]).abs().max() < 0.05 * change


SGD = OptimizerConfig(TableOptimizer.sgd, lr=0.5)
COMPRESSED = {
    "density 1": AveragingCompressionConfig(method=AveragingMethod.dct, density=1.0),
    "a tenth": AveragingCompressionConfig(method=AveragingMethod.dct, density=0.1, lifetime=2),
    "topk": AveragingCompressionConfig(method=AveragingMethod.topk, density=0.1, warmup_steps=2),
    "fp16": AveragingCompressionConfig(method=AveragingMethod.dct, density=0.2, value_dtype=ValueDtype.fp16),
}


@pytest.mark.parametrize(("num_groups", "sharding"), [(2, ShardingKind.row_wise), (4, ShardingKind.table_wise)])
def test_compressed_changes_are_sent_or_held_back(num_groups, sharding):
    """Of SGD's steps, which do not depend on the weights here: none is lost, and replicas stay bit-equal."""
    sync = SyncConfig(interval=2, rows=SyncRows.touched)
    plain = make_run(sync, optimizer=SGD, sharding=sharding, num_groups=num_groups, steps=12)
    adagrad = make_run(sync, num_groups=num_groups, sharding=sharding, steps=12)
    runs = {name: replace(plain, compression=compression) for name, compression in COMPRESSED.items()}
    runs["restarted"] = replace(runs["a tenth"], restart_at=5)
    runs["adagrad"] = adagrad
    runs["adagrad, density 1"] = replace(adagrad, compression=COMPRESSED["density 1"])
    exact, *results = step([plain, *runs.values()])
    compressed = dict(zip(runs, results, strict=True))
    assert_close(compressed["density 1"], exact)
    assert_close(compressed["adagrad, density 1"], compressed["adagrad"])
    assert bit_equal(compressed["restarted"], compressed["a tenth"])
    for name in ("a tenth", "topk", "fp16"):
        assert compressed[name].replicas_equal
        assert not bit_equal(compressed[name], exact)
        assert sum(compressed[name].payload_bytes) < sum(compressed["density 1"].payload_bytes) / 2
        for table in SHAPES:
            torch.testing.assert_close(compressed[name].settled[table], exact.tables[table], atol=1e-5, rtol=1e-5)
