"""What is sent and what stays, of any numbers: nothing is lost, bit for bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sparse2d.compression.error_feedback import ErrorFeedback, rounded
from sparse2d.compression.threshold import SMALLEST
from sparse2d.config import Scope, ThresholdConfig, ValueDtype

CPU = torch.device("cpu")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = float(np.finfo(np.float32).max)


def sends(feedback: ErrorFeedback, step: int) -> torch.Tensor:
    """What leaves in a step, as a flat tensor."""
    entries = feedback.entries(feedback.select(step))
    feedback.take(entries)
    sent = torch.zeros_like(feedback.flat)
    sent[entries.indices] = entries.decoded()
    return sent


@pytest.mark.parametrize("dtype", ValueDtype)
@given(values=npst.arrays(np.float32, npst.array_shapes(max_dims=1, max_side=30), elements=FINITE))
@example(values=np.array([LARGEST, 1.0, -LARGEST], np.float32))
@example(values=np.array([65504.0, 65519.9, 65520.0, 1e10, 3e-8], np.float32))
@example(values=np.array([SMALLEST, -3 * SMALLEST, 0.0], np.float32))
@example(values=np.array([1e-30, 1.0000001, 2.0**-24], np.float32))
def test_rounding_leaves_a_rest_that_is_exact(dtype, values):
    values = torch.from_numpy(values)
    sent, scale = rounded(values, dtype)
    decoded = sent.float() * scale
    assert decoded.isfinite().all()
    rest = values - decoded
    for value, part, other in zip(values.tolist(), decoded.tolist(), rest.tolist(), strict=True):
        assert Fraction(value) == Fraction(part) + Fraction(other)
    assert torch.equal(decoded + rest, values)


@given(npst.arrays(np.float32, 20, elements=st.floats(2.0**-10, 1, width=32)))
def test_fp16_keeps_11_bits_of_everything_near_the_largest(values):
    for factor in (1.0, 2.0**-60, 2.0**60):
        sent, scale = rounded(torch.from_numpy(values) * factor, ValueDtype.fp16)
        torch.testing.assert_close(sent.float() * scale / factor, torch.from_numpy(values), rtol=2**-11, atol=0)


@pytest.mark.parametrize("dtype", ValueDtype)
@given(data=st.data(), density=st.sampled_from([0.001, 0.1, 0.4, 1.0]), lifetime=st.integers(1, 4))
def test_sent_and_residual_are_gradient_and_old_residual(dtype, data, density, lifetime):
    sizes = {"a": 1, "b": 13, "c": 6}
    config = ThresholdConfig(density=density, lifetime=lifetime, value_dtype=dtype, warmup_steps=2)
    feedback = ErrorFeedback(sizes, config, data.draw(st.sampled_from(Scope)), CPU)
    # Not so large that the sum itself would be infinite.
    numbers = st.floats(-(2.0**120), 2.0**120, width=32)
    for step in range(1, 6):
        gradient = torch.from_numpy(data.draw(npst.arrays(np.float32, 20, elements=numbers)))
        accumulated = gradient + feedback.flat
        for name, part in zip(sizes, gradient.split(list(sizes.values())), strict=True):
            feedback.add(name, part)
        sent = sends(feedback, step)
        assert torch.equal(sent + feedback.flat, accumulated)


def accumulated(values: torch.Tensor, **options) -> ErrorFeedback:
    feedback = ErrorFeedback({"all": len(values)}, ThresholdConfig(**options), Scope.parameter, CPU)
    feedback.add("all", values)
    return feedback


@given(npst.arrays(np.float32, 50, elements=FINITE), st.integers(1, 50))
def test_a_step_that_finds_the_threshold_sends_the_largest_and_no_more_than_wanted(values, kept):
    feedback = accumulated(torch.from_numpy(values), density=kept / 50)
    indices = feedback.select(1).numpy()
    assert len(indices) == max(1, min(kept, np.count_nonzero(values)))
    assert len(set(indices.tolist())) == len(indices)
    assert np.abs(values[indices]).sum(dtype=float) == pytest.approx(
        np.sort(np.abs(values).astype(float))[::-1][: len(indices)].sum()
    )


def test_of_equal_values_the_first_are_sent_and_of_zeros_one():
    assert accumulated(torch.full((10,), -2.0), density=0.3).select(1).tolist() == [0, 1, 2]
    assert accumulated(torch.zeros(10), density=0.3).select(1).tolist() == [0]
    assert accumulated(torch.tensor([1.0, 3.0, -3.0, 3.0]), density=0.5).select(1).tolist() == [1, 2]


def test_a_tensor_smaller_than_1_over_density_sends_its_largest():
    feedback = ErrorFeedback({"w": 3, "b": 1}, ThresholdConfig(density=0.001), Scope.parameter, CPU)
    feedback.add("w", torch.tensor([1.0, -4.0, 2.0]))
    feedback.add("b", torch.tensor([0.5]))
    assert feedback.select(1).tolist() == [1, 3]


def test_when_nothing_reaches_an_old_threshold_the_largest_is_sent():
    feedback = accumulated(torch.tensor([5.0, 0.0, 0.0, 0.0]), density=0.25)
    assert sends(feedback, 1).tolist() == [5.0, 0.0, 0.0, 0.0]
    feedback.add("all", torch.tensor([0.0, 1.0, -2.0, 0.0]))
    assert sends(feedback, 2).tolist() == [0.0, 0.0, -2.0, 0.0]
    assert feedback.flat.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ValueDtype)
def test_what_is_not_finite_is_sent_and_does_not_stay(dtype):
    values = torch.tensor([math.nan, 1.0, math.inf, 0.25, -math.inf])
    feedback = accumulated(values, density=0.2, value_dtype=dtype)
    sent = sends(feedback, 1)
    assert sent[[0, 2, 4]].isnan().tolist() == [True, False, False]
    assert sent[[2, 4]].tolist() == [math.inf, -math.inf]
    assert feedback.flat.tolist() == [0.0, 1.0, 0.0, 0.25, 0.0]


def test_scopes_differ_in_whose_share_is_kept():
    def kept(scope: Scope) -> list[int]:
        feedback = ErrorFeedback({"small": 4, "large": 4}, ThresholdConfig(density=0.5), scope, CPU)
        feedback.add("small", torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
        feedback.add("large", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return feedback.select(1).tolist()

    assert kept(Scope.parameter) == [2, 3, 6, 7]
    assert kept(Scope.model) == [4, 5, 6, 7]
