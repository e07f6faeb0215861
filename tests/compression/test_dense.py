"""The hook on real ranks: against the reference, against no hook, across restarts; sent + residual at every step."""

import dataclasses
import math

import pytest
import torch
from compression_ranks import HookRun, HookSteps, hooked_steps

from sparse2d.compression.reference import dct_dp
from sparse2d.config import DenseCompressionConfig, DenseMethod, Scope, ValueDtype
from sparse2d.launch import run_ranks

NUM_RANKS = 4


def dct(method: DenseMethod = DenseMethod.dct, **options) -> DenseCompressionConfig:
    return DenseCompressionConfig(**({"method": method, "density": 0.05, "lifetime": 4} | options))


RUNS = {
    "none": HookRun(DenseCompressionConfig()),
    "allreduce": HookRun(DenseCompressionConfig(method=DenseMethod.allreduce)),
    "bf16": HookRun(DenseCompressionConfig(method=DenseMethod.bf16)),
    "powersgd": HookRun(DenseCompressionConfig(method=DenseMethod.powersgd, rank=2), bucket_kb=64),
    "powersgd restarted": HookRun(
        DenseCompressionConfig(method=DenseMethod.powersgd, rank=2), bucket_kb=64, restart_at=6
    ),
    "density 1": HookRun(dct(density=1.0)),
    "fp32": HookRun(dct()),
    "bf16 values": HookRun(dct(value_dtype=ValueDtype.bf16, density=0.1)),
    "fp16 values, one threshold": HookRun(dct(value_dtype=ValueDtype.fp16, scope=Scope.model, density=0.01)),
    "ranks alike": HookRun(dct(density=0.03, lifetime=2), alike=True),
    "topk": HookRun(dct(DenseMethod.topk, lifetime=1000)),
    "warm-up": HookRun(dct(density=0.002, warmup_steps=4, lifetime=100), static_graph=False),
    "one bucket": HookRun(dct(), bucket_kb=1024),
    "restarted": HookRun(dct(), restart_at=6),
    "warm-up restarted": HookRun(dct(density=0.002, warmup_steps=8, lifetime=100), restart_at=3),
    "poisoned": HookRun(dct(), steps=3, poison=2),
}
UNROUNDED = ["density 1", "fp32", "ranks alike", "topk", "warm-up", "one bucket"]
DCT = [name for name, run in RUNS.items() if run.config.method in (DenseMethod.dct, DenseMethod.topk)]


@pytest.fixture(scope="module")
def steps() -> dict[str, list[HookSteps]]:
    """For each run the steps of all ranks."""
    return dict(zip(RUNS, run_ranks(hooked_steps, list(RUNS.values()), num_ranks=NUM_RANKS), strict=True))


def assert_same(one: list[HookSteps], other: list[HookSteps], atol: float = 0) -> None:
    for mine, theirs in zip(one[0].means, other[0].means, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["allreduce", "density 1"])
def test_a_hook_that_holds_nothing_back_changes_nothing(steps, name):
    assert_same(steps[name], steps["none"], atol=1e-6)


@pytest.mark.parametrize("name", [name for name in DCT if name != "poisoned"])
def test_sent_and_residual_are_gradient_and_old_residual_on_every_rank(steps, name):
    for rank in steps[name]:
        old = torch.zeros_like(rank.gradients[0])
        assert len(rank.gradients) == RUNS[name].steps
        for gradient, sent, residual in zip(rank.gradients, rank.sent, rank.residuals, strict=True):
            assert torch.equal(sent + residual, gradient + old)
            old = residual


@pytest.mark.parametrize("name", [name for name in DCT if name != "poisoned"])
def test_every_rank_gets_the_mean_of_what_all_have_sent(steps, name):
    for step in range(RUNS[name].steps):
        mean = torch.stack([rank.sent[step] for rank in steps[name]]).mean(dim=0)
        torch.testing.assert_close(steps[name][0].means[step], mean, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(rank.means[step], steps[name][0].means[step]) for rank in steps[name])


def taus_of(run: HookRun, accumulated: torch.Tensor, sizes: list[int], density: float) -> torch.Tensor:
    """The threshold of each entry: the magnitude of the last of the wanted share of its parameter's."""
    parts = accumulated.abs().split(sizes)
    ranked = [part.sort(descending=True).values[max(1, round(density * len(part))) - 1] for part in parts]
    # Zeros are not sent.
    return torch.cat([tau.clamp_min(2.0**-149).expand(len(part)) for tau, part in zip(ranked, parts, strict=True)])


@pytest.mark.parametrize("name", UNROUNDED)
def test_dct_dp_is_the_reference(steps, name):
    run, ranks = RUNS[name], steps[name]
    lifetime = 1 if run.config.method is DenseMethod.topk else run.config.lifetime
    residuals = [torch.zeros_like(ranks[0].gradients[0])] * NUM_RANKS
    found: list = [(0.0, -math.inf)] * NUM_RANKS
    taus: list = [None] * NUM_RANKS
    for step in range(run.steps):
        if any(rank.collectives[step] == "dense" for rank in ranks):
            residuals = [torch.zeros_like(residual) for residual in residuals]
            continue
        # In the stages of a warm-up of four steps the density falls by a fourth of its way each.
        density = run.config.density ** (step / 4 if step < run.config.warmup_steps else 1)
        for r, rank in enumerate(ranks):
            if density != found[r][0] or step - found[r][1] >= lifetime:
                taus[r] = taus_of(run, rank.gradients[step] + residuals[r], rank.sizes, density)
                found[r] = (density, step)
        mean, sent, residuals = dct_dp([rank.gradients[step] for rank in ranks], residuals, taus)
        # The parameter whose gradients are all equal passes as a whole; only the first of equals are sent.
        equal = torch.cat([torch.full((size,), size == 17) for size in ranks[0].sizes])
        for rank, expected, left in zip(ranks, sent, residuals, strict=True):
            assert torch.equal(rank.sent[step][~equal], expected[~equal])
            assert torch.equal(rank.residuals[step][~equal], left[~equal])
        torch.testing.assert_close(ranks[0].means[step][~equal], mean[~equal], rtol=1e-6, atol=1e-7)


def test_the_collective_is_the_one_that_sends_fewest_bytes(steps):
    used = {name: {kind for rank in steps[name] for kind in rank.collectives} for name in DCT}
    assert used["density 1"] == {"dense"}
    # Where all ranks send the same positions their union is small.
    assert "union" in used["ranks alike"]
    assert "union" not in used["fp32"]
    assert used["fp16 values, one threshold"] == {"gather"}
    assert "dense" in used["warm-up"]
    assert used["warm-up"] & {"gather", "union"}
    for name in DCT:
        assert all(rank.collectives == steps[name][0].collectives for rank in steps[name])


def test_thresholds_are_found_once_in_a_lifetime(steps):
    parameters = len(steps["fp32"][0].sizes)
    assert steps["fp32"][0].thresholds_found == 3 * parameters
    assert steps["topk"][0].thresholds_found == 12 * parameters
    assert steps["fp16 values, one threshold"][0].thresholds_found == 3


def test_buckets_do_not_matter(steps):
    assert_same(steps["fp32"], steps["one bucket"])


@pytest.mark.parametrize("name", ["fp32", "powersgd"])
def test_a_restarted_run_is_the_same_bit_for_bit(steps, name):
    restarted = steps["restarted" if name == "fp32" else f"{name} restarted"]
    assert_same(restarted, steps[name])
    for one, other in zip(restarted, steps[name], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.residuals, other.residuals, strict=True))


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_stays_nowhere(steps):
    for rank in steps["poisoned"]:
        assert rank.means[0].isfinite().all()
        assert not rank.means[1].isfinite().all()
        assert rank.residuals[1].isfinite().all()
        assert rank.warnings == ["step 2: the gradient of layers.0.weight is not finite on some rank"]
    assert all(not rank.warnings for rank in steps["fp32"])


def test_torchs_hooks_come_close_to_the_mean(steps):
    for name, rtol in {"bf16": 0.02, "powersgd": 0.7}.items():
        distance = (steps[name][0].means[5] - steps["none"][0].means[5]).norm() / steps["none"][0].means[5].norm()
        assert 0 < distance < rtol, name


def test_runs_are_told_apart(steps):
    """Compression must do something for the above to mean anything."""
    assert not torch.equal(steps["fp32"][0].means[3], steps["none"][0].means[3])
    assert dataclasses.asdict(RUNS["fp32"].config) != dataclasses.asdict(RUNS["topk"].config)
