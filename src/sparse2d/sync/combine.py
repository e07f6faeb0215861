"""Rules that merge the replicas of a row from what changed in each since all were equal.

Derivation: experiments/ne_parity/README.md.
With w_old, v_old before and w_m, v_m on replica m, n replicas having looked the row up since:

- ``mean``: w_old + mean_m (w_m - w_old), the moments alike: the paper's (arXiv 2508.03854, section 3).
- ``delta_sum``: w_old + sum_m (w_m - w_old), the moments alike; each replica steps on g_m / M.
- ``touch_mean``: w_old + sum_m (w_m - w_old) / sqrt(n); moments v_old + sum_m (v_m - v_old) / n.
- ``merged_gradient``: each replica steps on g_m / M with AdaGrad: g_m / M = (w_old - w_m) (sqrt(v_m) + eps) / lr. With
  their sum G, v = v_old + G^2 (row-wise its mean) and w = w_old - lr G / (sqrt(v) + eps).
"""

from typing import Any

from torch import Tensor, nn

from sparse2d.config import Combine

# Rules that sum the changes of replicas which step on their share of the whole batch's gradient.
SUMS = (Combine.delta_sum, Combine.merged_gradient)


def share(rule: Combine, num_replicas: int, touching: Tensor | None, is_moment: bool) -> Tensor | float:
    """What the mean change over the M replicas is multiplied by: a number, or [rows].

    Args:
        rule: any but ``gradient`` and ``merged_gradient``.
        num_replicas: M.
        touching: n of each row, for ``touch_mean``.
        is_moment: whether the change is one of moments.
    """
    if rule is Combine.mean:
        return 1.0
    if rule is Combine.delta_sum:
        return float(num_replicas)
    assert touching is not None
    return num_replicas / (touching if is_moment else touching.sqrt())


def scale_gradients(kernel: nn.Module, factor: float) -> None:
    """Multiply all gradients that reach the rows of a lookup kernel."""

    def after_lookup(_: nn.Module, __: Any, pooled: Tensor) -> None:
        if pooled.requires_grad:
            pooled.register_hook(lambda grad: grad * factor)

    # First, so that whoever else looks at the gradient sees the scaled one.
    kernel.register_forward_hook(after_lookup, prepend=True)
