"""Which rows this rank looked up in training since the last averaging, from the lookups' own indices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse2d.sync.rows import ShardRows, State

# Recorded keys are made unique when they are so many more than the unique ones, to bound memory under a large K.
COMPACT_AFTER = 2**20
# With up to so many rows for each key, marking rows and reading the marks is faster than sorting keys.
ROWS_PER_KEY = 64


@dataclass(frozen=True)
class Touched:
    """Rows looked up since the last averaging.

    Attributes:
        keys: sorted and unique, [n].
        before: what these rows held before their first lookup, in the order of ``ShardRows.read``; None unless kept.
    """

    keys: Tensor
    before: list[Tensor] | None


def distinct(keys: Tensor, num_rows: int) -> Tensor:
    """Sorted distinct keys of ``keys`` [n], each below ``num_rows``."""
    if num_rows > ROWS_PER_KEY * len(keys):
        return keys.unique()
    seen = torch.zeros(num_rows, dtype=torch.bool, device=keys.device)
    seen[keys] = True
    return seen.nonzero().squeeze(1)


class TouchedRows:
    """Records lookups through a hook on each kernel; only what trains counts, an evaluation looks up without a trace.

    An own hook and not TorchRec's ``ModelDeltaTracker``: that one keys rows by feature, cannot tell the column-wise
    shards of a table apart, and is several times slower (see experiments/sync_cost).

    Args:
        rows: of this rank's shards.
        keep: what to copy of a row before it changes; empty to record keys only.
    """

    def __init__(self, rows: ShardRows, keep: Sequence[State] = ()) -> None:
        self._rows = rows
        self._keep = keep
        self._clear()
        for kernel, first_key in zip(rows.kernels, rows.kernel_starts, strict=True):
            self._watch(kernel.emb_module, first_key)

    def _clear(self) -> None:
        empty = torch.empty(0, dtype=torch.int64, device=self._rows.device)
        self._keys = empty
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._before: list[Tensor] = self._rows.read(self._rows.split(empty), self._keep).parts

    def _watch(self, kernel: Any, first_key: int) -> None:
        # First row of each feature's table among the kernel's rows; the last entry is the total.
        feature_starts = kernel.hash_size_cumsum[:-1] + first_key

        def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                indices, offsets = (
                    kwargs.get(name, args[i] if len(args) > i else None)
                    for i, name in enumerate(("indices", "offsets"))
                )
                self.record(indices, offsets, feature_starts)

        kernel.register_forward_pre_hook(record, with_kwargs=True)

    @torch.no_grad()
    def record(self, indices: Tensor, offsets: Tensor, feature_starts: Tensor) -> None:
        """Take one kernel's lookup.

        Args:
            indices: rows of the features' tables, feature by feature, [n].
            offsets: where each bag begins, [features x batch + 1].
            feature_starts: key of the first row of each feature's table, [features].
        """
        ends = offsets[:: (len(offsets) - 1) // len(feature_starts)] if len(offsets) > 1 else offsets
        keys = indices.long() + torch.repeat_interleave(feature_starts, ends.diff(), output_size=len(indices))
        if self._keep:
            self._keep_before(distinct(keys, self._rows.num_rows))
            return
        self._pending.append(keys)
        self._num_pending += len(keys)
        if self._num_pending > COMPACT_AFTER + 2 * len(self._keys):
            self._compact()

    def _compact(self) -> None:
        self._keys = distinct(torch.cat([self._keys, *self._pending]), self._rows.num_rows)
        self._pending, self._num_pending = [], 0

    def _keep_before(self, keys: Tensor) -> None:
        """Copy the rows that are looked up for the first time since the last averaging."""
        new = keys[~torch.isin(keys, self._keys, assume_unique=True)]
        added = self._rows.read(self._rows.split(new), self._keep).parts
        order = torch.cat([self._keys, new]).argsort()
        merged = torch.cat([self._keys, new])[order]
        old_rows, new_rows = self._rows.split(self._keys), self._rows.split(new)
        index = 0
        for shard, tensors in enumerate(self._rows.tensors(self._keep)):
            order = torch.cat([old_rows[shard], new_rows[shard]]).argsort()
            for _ in tensors:
                self._before[index] = torch.cat([self._before[index], added[index]])[order]
                index += 1
        self._keys = merged

    def take(self) -> Touched:
        """What was looked up since the last call, and start anew."""
        if self._pending:
            self._compact()
        touched = Touched(self._keys, self._before if self._keep else None)
        self._clear()
        return touched

    def state_dict(self) -> dict[str, Any]:
        """Rows recorded so far, for a checkpoint between two averagings."""
        if self._pending:
            self._compact()
        return {"keys": self._keys.clone(), "before": [tensor.clone() for tensor in self._before]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout."""
        self._clear()
        self._keys = state["keys"].to(self._rows.device)
        self._before = [tensor.to(self._rows.device) for tensor in state["before"]]
