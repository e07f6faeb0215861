"""Dynamic Communication Thresholding (arXiv 2010.08899) on plain tensors: what the fast paths are held to."""

from collections.abc import Sequence

import torch
from torch import Tensor


def dct_dp(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], taus: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One step of DCT-DP for one layer, all R ranks at once.

    With g_r the gradient of rank r, e_r its residual and tau_r its threshold, which was found in this step or up to
    L - 1 steps ago as the magnitude that the wanted share of |g_r + e_r| reached::

        a_r  = g_r + e_r
        s_r  = a_r where |a_r| >= tau_r, else 0        what is sent
        e_r' = a_r - s_r                               what is not: error feedback
        mean = 1/R * sum_r s_r                         what the optimizer gets

    Args:
        gradients: g_r, each of one shape.
        residuals: e_r, zeros before the first step.
        taus: tau_r, [] each.

    Returns:
        The mean, all s_r and all e_r'.
    """
    accumulated = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
    sent = [torch.where(a.abs() >= tau, a, torch.zeros_like(a)) for a, tau in zip(accumulated, taus, strict=True)]
    left = [a - s for a, s in zip(accumulated, sent, strict=True)]
    return torch.stack(sent).sum(dim=0) / len(sent), sent, left


def dct_mp(
    parts: Sequence[Tensor], taus: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One step of DCT-MP for one table and some samples, all R ranks that hold a part of the table at once.

    With x_r what rank r pools from its rows of the table (R = 1 unless it is split by rows) and tau_r its threshold,
    which was found in this step or up to L - 1 steps ago as the magnitude that the wanted share of the entries of all
    samples reached::

        m_r = |x_r| >= tau_r                  the entries that are sent
        y   = sum_r m_r x_r                   forward: values and positions travel
        g_r = m_r dl/dy                       backward: values alone; rank r knows m_r

    There is no error feedback: activations belong to a sample.

    Args:
        parts: x_r, [samples, dim] each.
        taus: tau_r, [] each.
        gradient: dl/dy, [samples, dim].

    Returns:
        y, all m_r and all g_r.
    """
    masks = [part.abs() >= tau for part, tau in zip(parts, taus, strict=True)]
    pooled = torch.stack([part * mask for part, mask in zip(parts, masks, strict=True)]).sum(dim=0)
    return pooled, masks, [gradient * mask for mask in masks]
