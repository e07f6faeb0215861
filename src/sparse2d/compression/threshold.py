"""Which entries are sent: thresholds for a wanted density, found every L steps and reused in between.

What is not finite passes every threshold, so that it is seen at once instead of staying somewhere; zeros pass none.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparse2d.config import ThresholdConfig

T = TypeVar("T", bound=ThresholdConfig)
# Stages of a warm-up: each step of the density is a new threshold.
WARMUP_STAGES = 4
# Zeros do not reach it, every other fp32 number does.
SMALLEST = 2.0**-149
# Elements that fit into the cache together with what is computed of them.
PIECE = 2**16


def num_kept(numel: int, density: float) -> int:
    """Entries that make up a share of ``numel``: the nearest number, at least one of any."""
    return min(numel, max(1, round(density * numel)))


def anew_each_time(config: T) -> T:
    """The same options with L = 1: top-k is a threshold that is found from the very values it is for."""
    return replace(config, lifetime=1)


def density_at(step: int, config: ThresholdConfig) -> float:
    """The density of a 1-based step: in warm-up it falls from 1 in equal ratios, as in arXiv 1712.01887."""
    if step > config.warmup_steps:
        return config.density
    stage = max(step - 1, 0) * WARMUP_STAGES // config.warmup_steps
    return float(config.density ** (stage / WARMUP_STAGES))


def threshold(values: Tensor, density: float) -> Tensor:
    """The magnitude that ``num_kept`` of the values reach: tau, fp32 [].

    With ties more of them may reach it. It is above zero, and infinite if no value is finite. At density 1 all that is
    not zero reaches it, in later steps, too.

    Args:
        values: any shape; what is not finite is left out.
        density: in (0, 1].
    """
    magnitudes = values.detach().float().abs().flatten()
    if density == 1:
        return magnitudes.new_tensor(SMALLEST)
    finite = magnitudes[magnitudes.isfinite()]
    if finite.numel() == 0:
        return magnitudes.new_tensor(math.inf)
    kept = min(num_kept(magnitudes.numel(), density), finite.numel())
    tau = finite.kthvalue(finite.numel() - kept + 1).values
    return tau.clamp_min(SMALLEST)


def passes(values: Tensor, tau: Tensor) -> Tensor:
    """Which values reach a threshold, bool of their shape; what is not finite always does."""
    # Not `>=`, which is false of NaN.
    return ~(values.abs() < tau)


def reaching(values: Tensor, tau: Tensor) -> Tensor:
    """Indices int64 [k], ascending, of the values [n] that pass a threshold [], or each its own [n].

    On the CPU by NumPy, piece by piece inside the cache: ten times faster than torch there (experiments/dct_dp).
    """
    if values.device.type != "cpu":
        return passes(values, tau).nonzero().squeeze(1)
    array, limit, found = values.numpy(), tau.numpy(), []
    magnitudes, marks = np.empty(PIECE, array.dtype), np.empty(PIECE, np.bool_)
    for start in range(0, len(array), PIECE):
        piece = array[start : start + PIECE]
        limits = limit[start : start + PIECE] if limit.ndim else limit
        below = np.less(np.abs(piece, out=magnitudes[: len(piece)]), limits, out=marks[: len(piece)])
        found.append(np.logical_not(below, out=below).nonzero()[0] + start)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64)


def without_ties(indices: Tensor, values: Tensor, tau: Tensor, kept: int) -> Tensor:
    """Indices without the last of those that just reach the threshold, as far as there are more than ``kept``.

    Args:
        indices: ascending, what ``reaching`` gives, [k].
        values: [n].
        tau: that was found from them.
        kept: the wanted number.
    """
    extra = len(indices) - kept
    if extra <= 0:
        return indices
    ties = (values[indices].abs() == tau).nonzero().squeeze(1)[-extra:]
    stays = torch.ones_like(indices, dtype=torch.bool)
    stays[ties] = False
    return indices[stays]


class KeptThreshold:
    """A threshold that is found from the values of one step and reused for ``config.lifetime`` steps.

    It is found anew before that if the density changes, as it does in warm-up.

    Args:
        config: density, L and warm-up.
    """

    def __init__(self, config: ThresholdConfig) -> None:
        self._config = config
        self._tau: Tensor | None = None
        self._density = 0.0
        self._found_at = 0
        # How often it has been found.
        self.num_found = 0

    def is_due(self, step: int) -> bool:
        """Whether ``step`` (1-based) needs a new threshold."""
        is_old = step - self._found_at >= self._config.lifetime
        return self._tau is None or is_old or density_at(step, self._config) != self._density

    def at(self, step: int, values: Tensor) -> Tensor:
        """The threshold of a step: tau, fp32 [].

        Args:
            step: 1-based.
            values: to find it from, if it is due.
        """
        if self._tau is None or self.is_due(step):
            self._density, self._found_at = density_at(step, self._config), step
            self._tau = threshold(values, self._density)
            self.num_found += 1
        # A checkpoint gives it back on the host.
        return self._tau.to(values.device)

    def first_of_ties(self, indices: Tensor, values: Tensor, numel: int) -> Tensor:
        """Of what reaches a threshold that was just found no more than the wanted share: of equal entries the first.

        Args:
            indices: ascending, what ``reaching`` gives, [k].
            values: that they are indices of, [n].
            numel: of those among them that the threshold was found from.
        """
        assert self._tau is not None
        return without_ties(indices, values, self._tau.to(values.device), num_kept(numel, self._density))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: tensors and numbers."""
        return {"tau": self._tau, "density": self._density, "found_at": self._found_at, "num_found": self.num_found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._tau, self._density = state["tau"], state["density"]
        self._found_at, self.num_found = state["found_at"], state["num_found"]
