"""DCT-DP on table rows: of what changed in touched rows the large changes reach the replicas, the rest is held back."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse2d.compression.error_feedback import Entries, rounded
from sparse2d.compression.exchange import Collective, SparseMean
from sparse2d.compression.threshold import KeptThreshold, density_at, reaching
from sparse2d.config import ThresholdConfig
from sparse2d.sync.rows import ShardRows, State
from sparse2d.sync.touched import Touched


class CompressedRows:
    """Averages rows by their changes since the last averaging (formula: ``compression/reference.py``).

    Everything is by element of the shards' weights and moments, each of which has a threshold for the share of what was
    touched in it. A change that is held back leaves the row itself, too, so that replicas stay bit-equal; it counts
    again when the row is touched again. That takes the memory of one more copy of the shards.

    Args:
        rows: of this rank's shards.
        state: what is averaged.
        config: density, L in averagings, warm-up and what is sent.
        group: the replicas.
    """

    def __init__(
        self, rows: ShardRows, state: Sequence[State], config: ThresholdConfig, group: dist.ProcessGroup
    ) -> None:
        self._rows = rows
        self._config = config
        # For each tensor the shard that it is of.
        owners = [(shard, tensor) for shard, tensors in enumerate(rows.tensors(state)) for tensor in tensors]
        self._shards = [shard for shard, _ in owners]
        self._tensors = [tensor.view(-1) for _, tensor in owners]
        self._widths = [tensor[:1].numel() for _, tensor in owners]
        self._residuals = [torch.zeros_like(tensor) for tensor in self._tensors]
        self._thresholds = [KeptThreshold(config) for _ in self._tensors]
        sizes = torch.tensor([0, *(tensor.numel() for tensor in self._tensors)])
        self._starts = sizes.cumsum(0).to(rows.device)
        self._mean = SparseMean(int(self._starts[-1]), config.value_dtype, group, rows.device)

    @property
    def payload_bytes(self) -> int:
        """Bytes handed to collectives so far."""
        return self._mean.payload_bytes

    @torch.no_grad()
    def average(self, number: int, touched: Touched) -> None:
        """Average, and leave all replicas bit-equal; a collective over them.

        Args:
            number: of this averaging, 1-based.
            touched: rows and what they held at the last averaging.
        """
        assert touched.before is not None
        own_rows = self._rows.split(touched.keys)
        indices, values = [], []
        for part, before in enumerate(touched.before):
            elements = self._elements(own_rows[self._shards[part]], self._widths[part])
            changes = self._tensors[part][elements] - before.reshape(-1) + self._residuals[part][elements]
            passing = self._passing(part, number, changes)
            self._residuals[part][elements] = changes
            self._tensors[part][elements] = before.reshape(-1)
            indices.append(elements[passing] + self._starts[part])
            values.append(changes[passing])
        sent = torch.cat(values)
        entries = Entries(torch.cat(indices), *rounded(sent, self._config.value_dtype))
        left = (sent - entries.decoded()).where(sent.isfinite(), 0)
        for part, span, elements in self._by_part(entries.indices):
            self._residuals[part][elements] = left[span]
        for where, mean in self._mean.mean(entries, None, self._chooses(number)).parts:
            for part, span, elements in self._by_part(where):
                self._tensors[part][elements] += mean[span]

    def _chooses(self, number: int) -> bool:
        """Whether thresholds are due by number; not by whether a rank has had rows to find them from."""
        density = density_at(number, self._config)
        return (number - 1) % self._config.lifetime == 0 or density != density_at(number - 1, self._config)

    def _by_part(self, indices: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """Of ascending indices [k] over all parts: each part, where its own are, and these within the part."""
        bounds = torch.searchsorted(indices, self._starts).tolist()
        for part, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                yield part, slice(start, stop), indices[start:stop] - self._starts[part]

    def _elements(self, rows: Tensor, width: int) -> Tensor:
        """Flat indices of the elements of some rows, in order."""
        return (rows[:, None] * width + torch.arange(width, device=rows.device)).view(-1)

    def _passing(self, part: int, number: int, changes: Tensor) -> Tensor:
        """Positions of the changes that are sent."""
        threshold = self._thresholds[part]
        is_due = threshold.is_due(number)
        if not changes.numel():
            return torch.empty(0, dtype=torch.int64, device=changes.device)
        passing = reaching(changes, threshold.at(number, changes))
        return threshold.first_of_ties(passing, changes, len(changes)) if is_due else passing

    def state_dict(self) -> dict[str, Any]:
        """What is held back, and the thresholds."""
        return {
            "residuals": [residual.clone() for residual in self._residuals],
            "thresholds": [threshold.state_dict() for threshold in self._thresholds],
            "sparse": self._mean.sparse.name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout and config."""
        for residual, saved in zip(self._residuals, state["residuals"], strict=True):
            residual.copy_(saved)
        for threshold, saved in zip(self._thresholds, state["thresholds"], strict=True):
            threshold.load_state_dict(saved)
        self._mean.sparse = Collective[state["sparse"]]
