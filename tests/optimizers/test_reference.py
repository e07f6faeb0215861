"""What a scaled moment is, as formulas."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse2d.optimizers.reference import rowwise_adagrad


@given(st.sampled_from([0.25, 2.0, 8.0, 64.0]), st.floats(0.01, 1.0), st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_a_scaled_moment_is_a_learning_rate_and_an_eps(scale, lr, seed):
    """C is ``lr * sqrt(c)`` and ``eps * sqrt(c)``, step by step, and the moments are the same."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(5, 4, generator=generator)
    (scaled, v_scaled), (plain, v_plain) = ((start.clone(), torch.zeros(5)) for _ in range(2))
    eps, root = 1e-2, scale**0.5
    for _ in range(6):
        grad = torch.randn(5, 4, generator=generator) * 0.1
        rowwise_adagrad(scaled, grad, v_scaled, lr=lr, eps=eps, moment_scale=scale)
        rowwise_adagrad(plain, grad, v_plain, lr=lr * root, eps=eps * root, moment_scale=1.0)
    assert torch.equal(v_scaled, v_plain)
    torch.testing.assert_close(scaled, plain, atol=1e-5, rtol=1e-5)
    assert not torch.equal(scaled, start)
