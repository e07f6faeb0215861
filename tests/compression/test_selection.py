"""Which entries are sent, against sorting in NumPy."""

import numpy as np
import pytest
import torch

from sparse2d.compression.selection import ThresholdSelection, TopkSelection, selection_of
from sparse2d.config import LookupCompressionConfig, LookupMethod

DIMS = [4, 12, 8]


def config(density: float, method: LookupMethod = LookupMethod.dct, **options) -> LookupCompressionConfig:
    return LookupCompressionConfig(method=method, density=density, **options)


def pooled(seed: int, samples: int = 50) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(samples, sum(DIMS))).astype(np.float32))


def test_each_table_has_its_own_threshold_over_all_samples():
    values = pooled(0)
    values[:, 4:16] *= 1000
    mask = ThresholdSelection(DIMS, config(0.1)).mask(values, 1, trains=True)
    for table, chosen in zip(values.split(DIMS, dim=1), mask.split(DIMS, dim=1), strict=True):
        kept = round(0.1 * table.numel())
        assert sorted(table[chosen].abs().tolist()) == sorted(np.abs(table.numpy()).flatten())[-kept:]


def test_an_evaluation_takes_thresholds_as_they_are_and_changes_none():
    selection = ThresholdSelection(DIMS, config(0.1, lifetime=2))
    assert selection.mask(pooled(1), 0, trains=False).all()
    first = selection.mask(pooled(0), 1, trains=True)
    assert not selection.mask(1e-3 * pooled(1), 1, trains=False).any()
    assert selection.mask(pooled(0), 2, trains=True).equal(first)
    assert selection.num_found == 1
    # Step 3 is the first that needs new ones, which an evaluation after step 2 must not find.
    assert not selection.mask(1e-3 * pooled(1), 3, trains=False).any()
    assert selection.mask(1e-3 * pooled(1), 3, trains=True).any()


def test_at_density_one_zeros_are_sent_and_below_it_they_are_not():
    values = pooled(0)
    values[::2] = 0
    assert ThresholdSelection(DIMS, config(1.0)).mask(values, 1, trains=True).all()
    warming = ThresholdSelection(DIMS, config(0.5, warmup_steps=4))
    assert warming.mask(values, 1, trains=True).all()
    sent = warming.mask(values, 5, trains=True)
    assert not sent[::2].any()
    # Half of all entries, which is all that are not zero.
    assert sent[1::2].all()


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_tables_of_one_value_and_smaller_than_one_entry(value):
    mask = ThresholdSelection([4], config(0.01)).mask(torch.full((3, 4), value), 1, trains=True)
    assert mask.all() if value else not mask.any()
    one = ThresholdSelection([4], config(0.01)).mask(torch.tensor([[1.0, -3.0, 2.0, 0.0]]), 1, trains=True)
    assert one.tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("method", [LookupMethod.dct, LookupMethod.topk])
def test_what_is_not_finite_is_always_sent(method):
    values = pooled(0)
    values[3, 5], values[7, 20] = torch.nan, -torch.inf
    selection = selection_of(DIMS, config(0.02, method))
    for step in (1, 2):
        mask = selection.mask(values, step, trains=True)
        assert mask[3, 5]
        assert mask[7, 20]
    assert mask.sum() < 0.3 * mask.numel()


def test_topk_sends_as_many_of_every_vector_and_at_least_one():
    for density, kept in ((0.25, [1, 3, 2]), (0.01, [1, 1, 1]), (1.0, DIMS)):
        mask = TopkSelection(DIMS, config(density, LookupMethod.topk)).mask(pooled(0), 1, trains=True)
        for table, chosen, count in zip(pooled(0).split(DIMS, 1), mask.split(DIMS, 1), kept, strict=True):
            assert (chosen.sum(dim=1) == count).all()
            largest = table.abs().sort(dim=1).values[:, -count]
            assert (table.abs()[chosen].view(-1, count) >= largest.unsqueeze(1)).all()


@pytest.mark.parametrize("method", [LookupMethod.dct, LookupMethod.topk])
def test_saved_in_warmup_and_after_it_the_rest_is_the_same(method):
    options = {"warmup_steps": 6} if method is LookupMethod.topk else {"warmup_steps": 6, "lifetime": 3}
    straight = selection_of(DIMS, config(0.05, method, **options))
    masks = []
    for step in range(1, 14):
        for_this = selection_of(DIMS, config(0.05, method, **options))
        for_this.load_state_dict(straight.state_dict(), torch.device("cpu"))
        masks.append(straight.mask(pooled(step), step, trains=True))
        assert for_this.mask(pooled(step), step, trains=True).equal(masks[-1])
        assert for_this.num_found == straight.num_found
    assert masks[0].all()
    assert masks[-1].float().mean() < 0.13


def test_a_state_of_before_the_first_step_makes_a_selection_forget():
    """As a rehearsed step is forgotten when a run goes on from a checkpoint."""
    selection = ThresholdSelection(DIMS, config(0.1))
    fresh = selection.state_dict()
    assert not selection.mask(pooled(0), 1, trains=True).all()
    selection.load_state_dict(fresh, torch.device("cpu"))
    assert selection.mask(pooled(0), 1, trains=False).all()


def test_without_tables_nothing_is_selected():
    selection = ThresholdSelection([], config(0.1))
    assert selection.mask(torch.empty(5, 0), 1, trains=True).shape == (5, 0)
    selection.load_state_dict(selection.state_dict(), torch.device("cpu"))
    assert selection.num_found == 0
