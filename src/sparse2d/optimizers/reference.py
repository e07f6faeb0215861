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


def adagrad(weight: Tensor, grad: Tensor, moment: Tensor, *, lr: float, eps: float) -> None:
    """AdaGrad with a moment for each element: ``v += g^2``, ``w -= lr * g / (sqrt(v) + eps)``; all [rows, dim]."""
    moment.add_(grad.square())
    weight.sub_(lr * grad / (moment.sqrt() + eps))


def adam(
    weight: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    touched: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Adam (arXiv 1412.6980, algorithm 1) on the rows of the batch; absent rows keep weights and moments.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.

    Args:
        weight: [rows, dim].
        grad: [rows, dim].
        moments: m and v, [rows, dim] each.
        touched: bool [rows], the rows of the batch.
        step: t, 1-based; all rows count the same steps, whether they were in the batch or not, as FBGEMM does.
        lr: learning rate.
        beta1: decay of m.
        beta2: decay of v.
        eps: added to the root.
    """
    first, second = moments
    rows = touched.unsqueeze(1)
    first.copy_(torch.where(rows, beta1 * first + (1 - beta1) * grad, first))
    second.copy_(torch.where(rows, beta2 * second + (1 - beta2) * grad.square(), second))
    change = lr * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
    weight.copy_(torch.where(rows, weight - change, weight))
