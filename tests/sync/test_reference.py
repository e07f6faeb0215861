"""The rules as formulas: what each must leave alone, and where they agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse2d.optimizers.reference import rowwise_adagrad
from sparse2d.sync.reference import (
    delta_sum,
    mean,
    merged_gradient,
    touch_mean_moments,
    touch_mean_weights,
)


@st.composite
def replicas_of_rows(draw):
    """Rows before, replicas of which some groups have changed some rows, and which."""
    num_groups, rows, dim = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    before = torch.randn(rows, dim, generator=generator)
    touched = torch.rand(num_groups, rows, generator=generator) < draw(st.floats(0, 1))
    change = torch.randn(num_groups, rows, dim, generator=generator) * touched.unsqueeze(2)
    return before, before + change, touched


@given(replicas_of_rows())
@settings(max_examples=50)
def test_rows_that_no_group_looked_up_stay(case):
    before, replicas, touched = case
    rests = ~touched.any(dim=0)
    for merged in (
        mean(replicas),
        delta_sum(before, replicas),
        touch_mean_weights(before, replicas, touched),
        touch_mean_moments(before, replicas, touched),
    ):
        torch.testing.assert_close(merged[rests], before[rests])


@given(replicas_of_rows())
@settings(max_examples=50)
def test_a_row_of_one_group_is_that_groups(case):
    before, replicas, touched = case
    once = touched.sum(dim=0) == 1
    own = replicas[touched.int().argmax(dim=0), torch.arange(len(before))]
    for merged in (
        delta_sum(before, replicas),
        touch_mean_weights(before, replicas, touched),
        touch_mean_moments(before, replicas, touched),
    ):
        torch.testing.assert_close(merged[once], own[once])


@given(replicas_of_rows())
@settings(max_examples=50)
def test_delta_sum_of_sgd_steps_on_shares_is_the_mean_of_steps_on_group_gradients(case):
    before, replicas, _ = case
    num_groups = len(replicas)
    shares = before + (replicas - before) / num_groups
    torch.testing.assert_close(delta_sum(before, shares), mean(replicas), atol=1e-6, rtol=1e-5)


@given(replicas_of_rows())
@settings(max_examples=50)
def test_the_mean_over_touching_groups_lies_between_their_values(case):
    before, replicas, touched = case
    seen = touched.any(dim=0)
    inf = torch.tensor(float("inf"))
    low = torch.where(touched.unsqueeze(2), replicas, inf).amin(dim=0)
    high = torch.where(touched.unsqueeze(2), replicas, -inf).amax(dim=0)
    merged = touch_mean_moments(before, replicas, touched)
    assert (merged[seen] >= low[seen] - 1e-5).all()
    assert (merged[seen] <= high[seen] + 1e-5).all()


def test_weights_by_hand():
    """Groups that moved a row by 1 and 3: the mean by 2, the sum by 4, the sum over sqrt(2), the mean over two."""
    before = torch.zeros(1, 2)
    replicas = torch.tensor([[[1.0, 1.0]], [[3.0, 3.0]], [[0.0, 0.0]]])
    touched = torch.tensor([[True], [True], [False]])
    values = {
        4 / 3: mean(replicas),
        4.0: delta_sum(before, replicas),
        4 / 2**0.5: touch_mean_weights(before, replicas, touched),
        2.0: touch_mean_moments(before, replicas, touched),
    }
    for value, merged in values.items():
        assert merged.tolist() == [[pytest.approx(value)] * 2]


def test_row_wise_moments_are_merged_like_the_rest():
    touched = torch.tensor([[True, False], [True, True]])
    merged = touch_mean_moments(torch.tensor([1.0, 1.0]), torch.tensor([[2.0, 1.0], [4.0, 9.0]]), touched)
    assert merged.tolist() == [3.0, 9.0]


@given(replicas_of_rows(), st.floats(0, 2))
@settings(deadline=None, max_examples=50)
def test_a_merged_gradient_is_that_of_the_whole_batch(case, moment_before):
    """One step of full model parallelism, whatever each group divided by."""
    before, gradients, _ = case
    shares = (gradients - before) / len(gradients)
    numbers = {"lr": 0.3, "eps": 0.1}
    old = torch.full((len(before),), moment_before)
    replicas, moments = before.expand_as(shares).clone(), old.expand(len(shares), -1).clone()
    for number in range(len(shares)):
        rowwise_adagrad(replicas[number], shares[number], moments[number], moment_scale=1.0, **numbers)
    columns = (old.unsqueeze(1), moments.unsqueeze(2))
    weight, moment = merged_gradient((before, columns[0]), (replicas, columns[1]), **numbers)
    want, want_moment = before.clone(), old.clone()
    rowwise_adagrad(want, shares.sum(dim=0), want_moment, moment_scale=1.0, **numbers)
    torch.testing.assert_close(weight, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moment.squeeze(1), want_moment, atol=1e-5, rtol=1e-4)
