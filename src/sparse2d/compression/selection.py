"""Which entries of pooled embeddings are sent: over a threshold of their table, or the largest of each vector."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparse2d.compression.threshold import KeptThreshold, density_at, num_kept, passes
from sparse2d.config import LookupCompressionConfig, LookupMethod


class Selection(Protocol):
    """Decides which entries are sent."""

    def mask(self, pooled: Tensor, step: int, *, trains: bool) -> Tensor:
        """Which entries are sent, bool [samples, dims of all tables].

        Args:
            pooled: [samples, dims of all tables], this rank's.
            step: 1-based, of training; 0 before the first one.
            trains: whether gradients will follow; an evaluation takes thresholds as they are.
        """

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: tensors and numbers."""

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from ``state_dict``."""

    @property
    def num_found(self) -> int:
        """How often thresholds have been found."""


class ThresholdSelection:
    """DCT-MP's: entries that reach the threshold of their table, found every L steps from all samples of a step.

    Until there are thresholds, and at density 1, everything is sent. Below it zeros never are, so that row-wise shards
    send nothing for the samples that have no rows there.

    Args:
        dims: columns of each table, in order.
        config: density, L and warm-up.
    """

    def __init__(self, dims: Sequence[int], config: LookupCompressionConfig) -> None:
        self._dims = list(dims)
        self._config = config
        self._of_tables = [KeptThreshold(config) for _ in self._dims]
        self._of_columns: Tensor | None = None

    def mask(self, pooled: Tensor, step: int, *, trains: bool) -> Tensor:
        """See ``Selection``."""
        if trains and density_at(step, self._config) < 1 and any(kept.is_due(step) for kept in self._of_tables):
            columns = pooled.split(self._dims, dim=1)
            taus = [kept.at(step, values) for kept, values in zip(self._of_tables, columns, strict=True)]
            self._spread(torch.stack(taus))
        if self._of_columns is None:
            return torch.ones_like(pooled, dtype=torch.bool)
        return passes(pooled, self._of_columns)

    def _spread(self, taus: Tensor) -> None:
        dims = torch.tensor(self._dims, device=taus.device)
        self._of_columns = taus.repeat_interleave(dims, output_size=sum(self._dims))

    def state_dict(self) -> dict[str, Any]:
        """See ``Selection``."""
        return {"of_tables": [kept.state_dict() for kept in self._of_tables]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """See ``Selection``."""
        for kept, of_table in zip(self._of_tables, state["of_tables"], strict=True):
            kept.load_state_dict(of_table)
        taus = [of_table["tau"] for of_table in state["of_tables"]]
        self._of_columns = None
        if taus and None not in taus:
            self._spread(torch.stack(taus).to(device))

    @property
    def num_found(self) -> int:
        """See ``Selection``."""
        return max((kept.num_found for kept in self._of_tables), default=0)


class TopkSelection:
    """The comparator: the largest entries of every vector, found anew for each; at least one of a vector.

    Args:
        dims: columns of each table, in order.
        config: density and warm-up.
    """

    def __init__(self, dims: Sequence[int], config: LookupCompressionConfig) -> None:
        self._dims = list(dims)
        self._config = config
        self.num_found = 0

    def mask(self, pooled: Tensor, step: int, *, trains: bool) -> Tensor:
        """See ``Selection``."""
        self.num_found += trains
        density = density_at(max(step, 1), self._config)
        mask = torch.zeros_like(pooled, dtype=torch.bool)
        for chosen, vectors in zip(mask.split(self._dims, dim=1), pooled.split(self._dims, dim=1), strict=True):
            # NaN counts as the largest of all.
            largest = vectors.abs().topk(num_kept(vectors.shape[1], density), dim=1).indices
            chosen.scatter_(1, largest, True)
        return mask

    def state_dict(self) -> dict[str, Any]:
        """See ``Selection``."""
        return {"num_found": self.num_found}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """See ``Selection``."""
        self.num_found = state["num_found"]


def selection_of(dims: Sequence[int], config: LookupCompressionConfig) -> Selection:
    """What ``compression.lookup.method`` asks for, over tables of these dims."""
    return (TopkSelection if config.method is LookupMethod.topk else ThresholdSelection)(dims, config)
