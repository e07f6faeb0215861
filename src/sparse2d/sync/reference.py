"""The rules by which M replicas of some rows become one, as formulas: what real ranks are tested against.

Replicas are [M, rows, ...], ``before`` [rows, ...] is what all of them held after the last averaging, and a result
[rows, ...] is what all of them hold from now on. n is the number of groups that looked a row up in between. Derived in
``experiments/ne_parity/README.md``.
"""

import torch
from torch import Tensor


def mean(replicas: Tensor) -> Tensor:
    """The mean over the replicas, of weights as of moments (arXiv 2508.03854, section 3)."""
    return replicas.mean(dim=0)


def delta_sum(before: Tensor, replicas: Tensor) -> Tensor:
    """``before + sum_m (w_m - before)``, of weights as of moments.

    Each group steps on ``g_m / M``, its share of the gradient of the whole batch, so that moments stay in the units of
    full model parallelism.
    """
    return before + (replicas - before).sum(dim=0)


def merged_gradient(
    before: tuple[Tensor, Tensor], replicas: tuple[Tensor, Tensor], *, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Weights and moments after AdaGrad's step on the gradient of the whole batch, from what the groups' own steps did.

    Each group steps on ``g_m / M``, which is ``(w_old - w_m) (sqrt(v_m) + eps) / lr`` where one step lies in between;
    of several steps all are taken to have been divided by the last v_m. With their sum G: ``v = v_old + mean_d(G^2)``,
    ``w = w_old - lr G / (sqrt(v) + eps)``. Pseudo-gradients under AdaGrad are those of arXiv 2003.00295.

    Args:
        before: weights [..., columns] and moments, [..., 1] if row-wise, else [..., columns].
        replicas: the same of each group, [M, ...].
        lr: AdaGrad's.
        eps: AdaGrad's.
    """
    (old, old_moment), (weights, moments) = before, replicas
    gradient = ((old - weights) * (moments.sqrt() + eps)).sum(dim=0) / lr
    squares = gradient.square()
    if old_moment.shape[-1] == 1:
        squares = squares.mean(dim=-1, keepdim=True)
    moment = old_moment + squares
    return old - lr * gradient / (moment.sqrt() + eps), moment


def touch_mean_weights(before: Tensor, replicas: Tensor, touched: Tensor) -> Tensor:
    """``before + sum_m (w_m - before) / sqrt(n)``; ``touched`` is bool [M, rows], and rows with n = 0 stay."""
    return before + (replicas - before).sum(dim=0) / _like(_num_touching(touched).sqrt(), before)


def touch_mean_moments(before: Tensor, replicas: Tensor, touched: Tensor) -> Tensor:
    """``before + sum_m (v_m - before) / n``: the mean over the groups that looked the row up."""
    return before + (replicas - before).sum(dim=0) / _like(_num_touching(touched), before)


def delayed_moments(moments: list[Tensor], snapshots: list[Tensor]) -> list[Tensor]:
    """Moments averaged one averaging late: ``v_m += mean(s) - s_m``, s being the moments at the averaging before.

    What a replica added since the snapshot stays its own until the next averaging.
    """
    average = mean(torch.stack(snapshots))
    return [moment + (average - snapshot) for moment, snapshot in zip(moments, snapshots, strict=True)]


def _num_touching(touched: Tensor) -> Tensor:
    """N [rows], at least 1: where it is 0, nothing has changed."""
    return touched.sum(dim=0).clamp(min=1).float()


def _like(per_row: Tensor, values: Tensor) -> Tensor:
    return per_row.view(-1, *[1] * (values.dim() - 1))
