"""Thresholds against NumPy's sort, on what gradients and activations may hold."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sparse2d.compression.threshold import PIECE, KeptThreshold, density_at, num_kept, passes, reaching, threshold
from sparse2d.config import ThresholdConfig

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANYTHING = st.one_of(NUMBERS, st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]))
DENSITIES = st.floats(1e-6, 1.0)
SHAPES = npst.array_shapes(max_dims=2, max_side=40)


@given(npst.arrays(np.float32, SHAPES, elements=NUMBERS, unique=True), DENSITIES)
def test_of_distinct_magnitudes_the_largest_share_passes(values, density):
    values = np.unique(np.abs(values[values != 0]))
    kept = max(1, round(density * len(values))) if len(values) else 0
    passing = passes(torch.from_numpy(values), threshold(torch.from_numpy(values), density))
    assert values[passing.numpy()].tolist() == values[len(values) - kept :].tolist()


@given(npst.arrays(np.float32, SHAPES, elements=ANYTHING), DENSITIES)
@example(np.zeros(50, np.float32), 0.01)
@example(np.full(50, -2.5, np.float32), 0.01)
@example(np.array([np.nan, np.inf, -np.inf], np.float32), 0.5)
@example(np.array([np.nan, 3.0, 0.0], np.float32), 1.0)
@example(np.full(3, 2.0**-149, np.float32), 1.0)
def test_of_anything_what_passes_is_larger_and_there_is_enough_of_it(values, density):
    tau = threshold(torch.from_numpy(values), density)
    passing = passes(torch.from_numpy(values), tau).numpy()
    finite = np.isfinite(values)
    assert not math.isnan(tau)
    assert passing[~finite].all()
    assert not passing[values == 0].any()
    sent, left = np.abs(values[finite & passing]), np.abs(values[finite & ~passing])
    if sent.size and left.size:
        assert sent.min() > left.max()
    wanted = max(1, round(density * values.size))
    assert sent.size >= min(wanted, np.count_nonzero(values[finite]))
    # More than asked for only by ties at the threshold.
    assert (sent > float(tau)).sum() < wanted or not sent.size


def test_all_equal_values_pass_together_and_none_of_nothing():
    assert passes(torch.full((7,), -3.0), threshold(torch.full((7,), -3.0), 0.1)).all()
    assert threshold(torch.empty(0), 0.1) == math.inf
    assert threshold(torch.tensor([math.nan]), 0.5) == math.inf


def test_at_density_1_smaller_values_of_later_steps_pass_too():
    kept = KeptThreshold(ThresholdConfig(density=1.0))
    kept.at(1, torch.tensor([5.0, 6.0]))
    assert passes(torch.tensor([2.0**-149, 0.0]), kept.at(2, torch.tensor([0.0]))).tolist() == [True, False]


def test_what_reaches_its_threshold_is_found_in_long_tensors_too():
    values = torch.randn(2 * PIECE + 777, generator=torch.Generator().manual_seed(0))
    taus = torch.linspace(1, 4, len(values))
    assert reaching(values, torch.tensor(3.0)).tolist() == np.flatnonzero(np.abs(values.numpy()) >= 3).tolist()
    assert reaching(values, taus).tolist() == np.flatnonzero(np.abs(values.numpy()) >= taus.numpy()).tolist()


@pytest.mark.parametrize(
    ("numel", "density", "kept"),
    [(1, 0.001, 1), (999, 0.001, 1), (1000, 0.001, 1), (2000, 0.001, 2), (100, 0.07, 7), (5, 1.0, 5), (0, 0.5, 0)],
)
def test_at_least_one_entry_is_kept_of_any(numel, density, kept):
    assert num_kept(numel, density) == kept


def found_at(config: ThresholdConfig, steps: range) -> list[int]:
    """Steps whose own values the threshold of a step comes from: at step s the values are all s."""
    kept = KeptThreshold(config)
    return [int(kept.at(step, torch.full((10,), float(step)))) for step in steps]


@given(st.integers(1, 50), st.integers(1, 200))
def test_a_threshold_is_used_for_its_lifetime(lifetime, steps):
    found = found_at(ThresholdConfig(lifetime=lifetime), range(1, steps + 1))
    assert found == [1 + (step - 1) // lifetime * lifetime for step in range(1, steps + 1)]


def test_warmup_lowers_the_density_in_equal_ratios_and_finds_a_threshold_for_each():
    config = ThresholdConfig(density=0.0001, lifetime=1000, warmup_steps=8)
    densities = [density_at(step, config) for step in range(1, 11)]
    assert densities == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001])
    # At density 1 no threshold is of any step.
    assert found_at(config, range(1, 11)) == [0, 0, 3, 3, 5, 5, 7, 7, 9, 9]
    assert density_at(1, ThresholdConfig(density=0.5, warmup_steps=0)) == 0.5


def test_a_saved_threshold_goes_on_where_it_was():
    config = ThresholdConfig(lifetime=4)
    kept = KeptThreshold(config)
    for step in range(1, 4):
        kept.at(step, torch.full((10,), float(step)))
    resumed = KeptThreshold(config)
    resumed.load_state_dict(kept.state_dict())
    assert [int(resumed.at(step, torch.full((10,), float(step)))) for step in range(4, 10)] == [1, 5, 5, 5, 5, 9]
    assert resumed.num_found == 3
