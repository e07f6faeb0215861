"""Averages the M replicas of this rank's shards every K steps: the rows that were touched, or all."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparse2d.config import SyncConfig, SyncMoments, SyncRows, WireDtype
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.sync.collectives import gather_keys, mean_bf16, mean_fp32
from sparse2d.sync.rows import RowsByShard, ShardRows, State
from sparse2d.sync.touched import Touched, TouchedRows

log = logging.getLogger(__name__)


@dataclass
class DelayedMoments:
    """Moments on their way: averaged from the values at one averaging, applied at the next.

    Attributes:
        rows: of each shard.
        snapshot: this replica's values when they were sent.
        mean: over the replicas, once ``work`` is done; flat.
        work: the all-reduce under way.
    """

    rows: list[Tensor | None]
    snapshot: list[Tensor]
    mean: Tensor
    work: Any = None


class ReplicaAverager:
    """Call ``after_step`` once per training step; the schedule is counted from step 1.

    Rows that no replica looked up since the last averaging are equal on all replicas, so leaving them out changes
    nothing. Which rows any replica looked up is agreed on by exchanging their keys.

    Args:
        model: the 2D model whose shards are averaged.
        config: K, which rows, what becomes of the moments, and what is sent.
    """

    def __init__(self, model: Sparse2D, config: SyncConfig) -> None:
        self._model = model
        self._config = config
        self._group = model.replica_pg
        self._rows = ShardRows(model)
        # What one averaging makes equal at once.
        self._state = [State.weights]
        if config.moments is SyncMoments.with_weights:
            self._state.append(State.moments)
        self._delayed: DelayedMoments | None = None
        # Shards of which all rows are averaged; None until `auto` has seen what is touched.
        self._averages_all: list[bool] | None = None
        self._touched: TouchedRows | None = None
        if config.rows is SyncRows.all:
            self._averages_all = [True] * len(self._rows.shards)
        else:
            self._touched = TouchedRows(self._rows, keep=self._state if config.wire_dtype is WireDtype.bf16 else ())
            if config.rows is SyncRows.touched:
                self._averages_all = [False] * len(self._rows.shards)
        if self._rows.device.type == "cpu":
            model.set_all_reduce_hook(self._mean_over_gloo)
        self.durations_s: list[float] = []
        self.payloads_bytes: list[int] = []

    def after_step(self, step: int) -> None:
        """Average if ``step`` (1-based) is a multiple of K."""
        if step % self._config.interval == 0:
            start = time.perf_counter()
            self.average()
            self.durations_s.append(time.perf_counter() - start)

    @torch.no_grad()
    def average(self) -> None:
        """Replace weights, and moments if configured, by their mean over the replicas; a collective over them."""
        self.payloads_bytes.append(0)
        self._apply_delayed()
        if self._touched is None:
            rows: list[Tensor | None] = [None] * len(self._rows.shards)
            # Upstream's own, which reduces in place.
            self._model.sync(include_optimizer_state=State.moments in self._state)
        else:
            touched = self._touched.take()
            rows = self._agree_on_rows(touched.keys)
            self._average(rows, touched)
        self._send_moments(rows)

    def _agree_on_rows(self, keys: Tensor) -> list[Tensor | None]:
        """Rows of each shard that any replica touched; None where all are averaged anyway.

        Args:
            keys: what this rank touched, sorted.
        """
        if self._averages_all is not None and any(self._averages_all):
            own = self._rows.split(keys)
            kept = [rows + self._rows.starts[i] for i, rows in enumerate(own) if not self._averages_all[i]]
            keys = torch.cat([keys[:0], *kept])
        # Keys fit into 32 bits unless a rank holds more than two billion rows.
        compact = keys.int() if self._rows.num_rows < 2**31 else keys
        gathered = torch.cat(gather_keys(compact, self._group)).long()
        self._count(compact, compact.element_size())
        union = gathered.unique()
        rows = self._rows.split(union)
        if self._averages_all is None:
            self._averages_all = self._choose(gathered, rows)
        return [None if is_all else part for is_all, part in zip(self._averages_all, rows, strict=True)]

    def _choose(self, gathered: Tensor, union: list[Tensor]) -> list[bool]:
        """``auto``: for each shard whether averaging all rows sends fewer bytes than keys and touched rows.

        All replicas see the same keys and so choose alike. Bytes are those of a ring all-gather and all-reduce, less
        the factor (M - 1) / M that they have in common.
        """
        row_bytes = self._rows.row_bytes(self._state)
        narrow = 2 if self._config.wire_dtype is WireDtype.bf16 else 1
        key_bytes = 4 if self._rows.num_rows < 2**31 else 8
        choice = []
        for shard, keys, rows, size in zip(
            self._rows.shards, self._rows.split(gathered.sort().values), union, row_bytes, strict=True
        ):
            touched = key_bytes * len(keys) + 2 * len(rows) * size / narrow
            choice.append(touched >= 2 * len(shard.weight) * size)
        log.info(
            "averaging the touched rows of %d shards on this rank and all rows of the other %d, by bytes",
            choice.count(False),
            choice.count(True),
        )
        return choice

    def _average(self, rows: RowsByShard, touched: Touched) -> None:
        """Average the state of some rows."""
        values = self._rows.read(rows, self._state)
        if touched.before is None:
            self._rows.write(rows, self._state, self._mean_of(values, mean_fp32))
            return
        # Sent as bf16, a weight keeps 8 bits of itself; what changed in it since all replicas were equal needs no more.
        is_touched = [rows[i] is not None for i, tensors in enumerate(self._rows.tensors(self._state)) for _ in tensors]
        before = self._before(rows, values, touched)
        changes = [now - then for now, then, sent in zip(values, before, is_touched, strict=True) if sent]
        whole = [now for now, sent in zip(values, is_touched, strict=True) if not sent]
        changes, whole = self._mean_of(changes, mean_bf16), self._mean_of(whole, mean_fp32)
        remaining_changes, remaining_whole = iter(changes), iter(whole)
        means = [
            then + next(remaining_changes) if sent else next(remaining_whole)
            for then, sent in zip(before, is_touched, strict=True)
        ]
        self._rows.write(rows, self._state, means)

    def _before(self, rows: RowsByShard, values: list[Tensor], touched: Touched) -> list[Tensor]:
        """What each of ``rows`` held at the last averaging: rows that only other replicas touched hold it still."""
        assert touched.before is not None
        own = self._rows.split(touched.keys)
        before = []
        kept = iter(touched.before)
        remaining = iter(values)
        for index, tensors in enumerate(self._rows.tensors(self._state)):
            union = rows[index]
            for _ in tensors:
                then, mine = next(remaining).clone(), next(kept)
                if union is not None:
                    then[torch.searchsorted(union, own[index])] = mine
                before.append(then)
        return before

    def _send_moments(self, rows: list[Tensor | None]) -> None:
        """``delayed``: start to average the moments as they are now."""
        if self._config.moments is not SyncMoments.delayed:
            return
        snapshot = self._rows.read(rows, [State.moments])
        flat = _flatten(snapshot)
        self._count(flat, flat.element_size())
        work = dist.all_reduce(flat, group=self._group, async_op=True) if len(flat) else None
        self._delayed = DelayedMoments(rows, snapshot, flat, work)

    def _apply_delayed(self) -> None:
        """``delayed``: take in what was sent at the last averaging (formula: ``reference.delayed_moments``)."""
        delayed = self._wait_for_delayed()
        if delayed is None:
            return
        means = _split_like(delayed.mean, delayed.snapshot)
        now = self._rows.read(delayed.rows, [State.moments])
        corrected = [
            # Where nothing was added the mean itself, so that rows which go on untouched are bit-equal on all replicas.
            torch.where(value == then, mean, value + (mean - then))
            for value, then, mean in zip(now, delayed.snapshot, means, strict=True)
        ]
        self._rows.write(delayed.rows, [State.moments], corrected)
        self._delayed = None

    def _wait_for_delayed(self) -> DelayedMoments | None:
        if self._delayed is not None and self._delayed.work is not None:
            self._delayed.work.wait()
            self._delayed.mean.div_(dist.get_world_size(self._group))
            self._delayed.work = None
        return self._delayed

    def _mean_of(self, tensors: list[Tensor], mean: Callable[[Tensor, dist.ProcessGroup], Tensor]) -> list[Tensor]:
        """Mean over the replicas in one collective: one for each table would cost 26 latencies."""
        flat = _flatten(tensors)
        if not len(flat):
            return tensors
        self._count(flat, 2 if mean is mean_bf16 else flat.element_size())
        return _split_like(mean(flat, self._group), tensors)

    def _mean_over_gloo(self, tensors: list[Tensor]) -> None:
        """Upstream's hook: gloo has no average."""
        for tensor, mean in zip(tensors, self._mean_of(tensors, mean_fp32), strict=True):
            tensor.copy_(mean)

    def _count(self, sent: Tensor, element_bytes: int) -> None:
        self.payloads_bytes[-1] += sent.numel() * element_bytes

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of this rank besides weights and moments; plain tensors, lists and numbers."""
        delayed = self._wait_for_delayed()
        return {
            "averages_all": self._averages_all,
            "touched": None if self._touched is None else self._touched.state_dict(),
            "delayed": None
            if delayed is None
            else {"rows": delayed.rows, "snapshot": delayed.snapshot, "mean": delayed.mean},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout and config."""
        self._averages_all = state["averages_all"]
        if self._touched is not None:
            self._touched.load_state_dict(state["touched"])
        self._delayed = None if state["delayed"] is None else DelayedMoments(**state["delayed"])


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
