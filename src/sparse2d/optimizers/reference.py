"""The table optimizers as readable formulas on whole tables: what the fused kernels are tested against.

All functions update in place. ``grad`` is the table's dense gradient [rows, dim], so ids that occur several times in a
batch are already summed (coalesced); rows absent from the batch have gradient zero and stay as they are.
"""

import torch
from torch import Tensor


def sgd(weight: Tensor, grad: Tensor, *, lr: float) -> None:
    """``w -= lr * g``; weight and grad [rows, dim]."""
    weight.sub_(lr * grad)


def rowwise_adagrad(
    weight: Tensor, grad: Tensor, moment: Tensor, *, lr: float, eps: float, moment_scale: float
) -> None:
    """Row-wise AdaGrad with a scaled second moment (arXiv 2508.03854, section 4).

    ``v += mean_d(g^2)``, then ``w -= lr * g / (sqrt(v / c) + eps)``. One moment per row: gradient [1, 3] adds 5, not 4.

    Args:
        weight: [rows, dim].
        grad: [rows, dim].
        moment: v, [rows].
        lr: learning rate.
        eps: added to the root, outside of it, as FBGEMM does.
        moment_scale: c; 1 is plain row-wise AdaGrad, M the paper's choice under 2D.
    """
    moment.add_(grad.square().mean(dim=1))
    weight.sub_(lr * grad / ((moment / moment_scale).sqrt() + eps).unsqueeze(1))


def average_replicas(replicas: list[Tensor]) -> Tensor:
    """Mean over the M replicas of one shard: what every synchronisation leaves on each of them."""
    return torch.stack(replicas).mean(dim=0)
