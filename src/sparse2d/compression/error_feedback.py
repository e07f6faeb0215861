"""Local half of DCT-DP: what passes the threshold leaves the accumulated gradient, the rest stays for later steps.

sent + residual = gradient + old residual, bit for bit: a value that is sent is rounded to the nearest one of its type,
whose distance from the fp32 value is itself an fp32 number, so that the subtraction below is exact (a test tries it).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse2d.compression.threshold import KeptThreshold, reaching
from sparse2d.config import Scope, ThresholdConfig, ValueDtype

DTYPES = {ValueDtype.fp32: torch.float32, ValueDtype.bf16: torch.bfloat16, ValueDtype.fp16: torch.float16}


@dataclass(frozen=True)
class Entries:
    """Entries of a flat tensor, on their way.

    Attributes:
        indices: ascending, int64 [k].
        values: in the type they are sent as, [k].
        scale: a power of two that the values are to be multiplied by, fp32 [1].
    """

    indices: Tensor
    values: Tensor
    scale: Tensor

    def decoded(self) -> Tensor:
        """The values as fp32 [k]; exact."""
        return self.values.float() * self.scale


def rounded(values: Tensor, dtype: ValueDtype) -> tuple[Tensor, Tensor]:
    """Finite values to the nearest ones of a type, never to infinity, and the scale of all of them.

    fp16 has few exponents, so that the values are divided by a power of two first: the largest ends near the top.

    Args:
        values: fp32 [k].
        dtype: what they are sent as.

    Returns:
        The values, [k], and the power of two that they are to be multiplied by, fp32 [1].
    """
    one = values.new_ones(1)
    if dtype is ValueDtype.fp32:
        return values, one
    finite = values.isfinite()
    if dtype is ValueDtype.fp16 and values.numel():
        exponent = torch.frexp(values.where(finite, 0).abs().max()).exponent.clamp_min(-100) - 16
        one = torch.ldexp(one, exponent)
        values = values / one
    limit = torch.finfo(DTYPES[dtype]).max
    return values.where(~finite, values.clamp(-limit, limit)).to(DTYPES[dtype]), one


class ErrorFeedback:
    """Accumulates gradients of named parts, one flat tensor, and takes out what is to be sent.

    Args:
        sizes: elements of each part, in order.
        config: density, L, warm-up and what is sent.
        scope: whether each part has its own threshold.
        device: of the gradients.
    """

    def __init__(self, sizes: Mapping[str, int], config: ThresholdConfig, scope: Scope, device: torch.device) -> None:
        self._config = config
        # Before ``take`` gradient + residual, after it the residual.
        self.flat = torch.zeros(sum(sizes.values()), device=device)
        self._parts = dict(zip(sizes, self.flat.split(list(sizes.values())), strict=True))
        self._scopes = self._parts if scope is Scope.parameter else {"model": self.flat}
        self._thresholds = {name: KeptThreshold(config) for name in self._scopes}
        # Of each element; None until they are found.
        self._taus: Tensor | None = None

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of one part, of its size in any shape."""
        part = self._parts[name]
        part.add_(gradient.reshape(-1))

    def finds_threshold(self, step: int) -> bool:
        """Whether any threshold is due at ``step`` (1-based); the same on all ranks."""
        return any(threshold.is_due(step) for threshold in self._thresholds.values())

    @property
    def num_found(self) -> int:
        """Thresholds found so far, over all scopes."""
        return sum(threshold.num_found for threshold in self._thresholds.values())

    @torch.no_grad()
    def select(self, step: int) -> Tensor:
        """Indices [k], ascending, of what is to be sent in a step: at least one, the largest, whatever the threshold.

        In a step that finds a threshold no more than the wanted share: of equal entries the first ones.
        """
        is_due = [threshold.is_due(step) for threshold in self._thresholds.values()]
        if self._taus is None or any(is_due):
            taus = [kept.at(step, self._scopes[name]) for name, kept in self._thresholds.items()]
            self._taus = torch.cat([t.expand(len(v)) for t, v in zip(taus, self._scopes.values(), strict=True)])
        indices = reaching(self.flat, self._taus)
        if any(is_due):
            indices = self._without_ties(indices, is_due)
        return indices if len(indices) or not len(self.flat) else self.flat.abs().argmax().view(1)

    def _without_ties(self, indices: Tensor, is_due: list[bool]) -> Tensor:
        """No more than the wanted share of each scope whose threshold was found in this step."""
        parts, start = [], 0
        for (name, values), found in zip(self._scopes.items(), is_due, strict=True):
            first, last = torch.searchsorted(indices, indices.new_tensor([start, start + len(values)])).tolist()
            own = indices[first:last]
            if found:
                own = self._thresholds[name].first_of_ties(own, self.flat, len(values))
            parts.append(own)
            start += len(values)
        return torch.cat(parts)

    @torch.no_grad()
    def entries(self, indices: Tensor) -> Entries:
        """What would be sent of some indices [k]."""
        return Entries(indices, *rounded(self.flat[indices], self._config.value_dtype))

    @torch.no_grad()
    def take(self, entries: Entries) -> None:
        """Take out what is sent; what rounding has left of a value stays, and nothing of one that is not finite."""
        values = self.flat[entries.indices]
        self.flat[entries.indices] = (values - entries.decoded()).where(values.isfinite(), 0)

    @torch.no_grad()
    def take_all(self) -> None:
        """Take out everything."""
        self.flat.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and thresholds, by name."""
        return {
            "residuals": {name: part.clone() for name, part in self._parts.items()},
            "thresholds": {name: threshold.state_dict() for name, threshold in self._thresholds.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""
        for name, part in self._parts.items():
            part.copy_(state["residuals"][name])
        for name, threshold in self._thresholds.items():
            threshold.load_state_dict(state["thresholds"][name])
        self._taus = None
