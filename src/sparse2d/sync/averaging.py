"""Averages the M replicas of this rank's shards every K steps: the rows that were touched, or all."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse2d.compression.threshold import anew_each_time
from sparse2d.config import (
    AveragingCompressionConfig,
    AveragingMethod,
    Combine,
    OptimizerConfig,
    SyncConfig,
    SyncMoments,
    SyncRows,
    WireDtype,
)
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.sync.collectives import Exchange, flatten
from sparse2d.sync.combine import SUMS, scale_gradients, share
from sparse2d.sync.compressed import CompressedRows
from sparse2d.sync.rows import RowsByShard, RowValues, ShardRows, State
from sparse2d.sync.touched import Touched, TouchedRows, distinct

log = logging.getLogger(__name__)

# Elements from which on copying a tensor into a common buffer costs more than a collective of its own.
REDUCED_ALONE = 2**18


@dataclass
class DelayedMoments:
    """Moments on their way: averaged from the values at one averaging, applied at the next.

    Attributes:
        rows: of each shard.
        snapshot: this replica's values when they were sent, flat.
        mean: over the replicas, once ``work`` is done, flat.
        work: the all-reduce under way.
    """

    rows: list[Tensor | None]
    snapshot: Tensor
    mean: Tensor
    work: Any = None


class ReplicaAverager:
    """Call ``after_step`` once per training step; the schedule is counted from step 1.

    Rows that no replica looked up since the last averaging are equal on all replicas, so leaving them out changes
    nothing. Which rows any replica looked up is agreed on by exchanging their keys.

    Args:
        model: the 2D model whose shards are averaged.
        config: K, which rows, what becomes of the moments, and what is sent.
        optimizer: of the tables, from whose steps ``merged_gradient`` takes the gradients.
        compression: what of it is held back, if any.
    """

    def __init__(
        self,
        model: Sparse2D,
        config: SyncConfig,
        optimizer: OptimizerConfig,
        compression: AveragingCompressionConfig | None = None,
    ) -> None:
        self._model = model
        self._config, self._optimizer = config, optimizer
        self._rows = ShardRows(model)
        self._exchange = Exchange(model.replica_pg, self._rows.num_rows)
        # What one averaging makes equal at once.
        self._state = [State.weights]
        if config.moments is SyncMoments.with_weights:
            self._state.append(State.moments)
        self._delayed: DelayedMoments | None = None
        # Shards of which all rows are averaged; None until `auto` has seen what is touched.
        self._averages_all: list[bool] | None = None
        self._touched: TouchedRows | None = None
        self._compressed: CompressedRows | None = None
        if config.rows is SyncRows.all:
            self._averages_all = [True] * len(self._rows.shards)
        else:
            compresses = compression is not None and compression.method is not AveragingMethod.none
            needs_changes = compresses or config.wire_dtype is WireDtype.bf16 or config.combine is not Combine.mean
            self._touched = TouchedRows(self._rows, keep=self._state if needs_changes else ())
            # Changes are known of touched rows only.
            if config.rows is SyncRows.touched or config.combine is not Combine.mean or compresses:
                self._averages_all = [False] * len(self._rows.shards)
            if compression is not None and compresses:
                if compression.method is AveragingMethod.topk:
                    compression = anew_each_time(compression)
                self._compressed = CompressedRows(self._rows, self._state, compression, model.replica_pg)
        if self._rows.device.type == "cpu":
            model.set_all_reduce_hook(self._mean_over_gloo)
        self.durations_s: list[float] = []
        if config.combine in SUMS:
            for kernel in self._rows.kernels:
                scale_gradients(kernel.emb_module, 1 / self._exchange.size)

    @property
    def payloads_bytes(self) -> list[int]:
        """Bytes that this rank handed to collectives, for each averaging."""
        return self._exchange.payloads_bytes

    def after_step(self, step: int) -> None:
        """Average if ``step`` (1-based) is a multiple of K."""
        if step % self._config.interval == 0:
            start = time.perf_counter()
            self.average(step // self._config.interval)
            self.durations_s.append(time.perf_counter() - start)

    @torch.no_grad()
    def average(self, number: int = 1) -> None:
        """Merge weights, and moments if configured, over the replicas; a collective over them.

        Args:
            number: of this averaging, 1-based, which compression counts by.
        """
        if not self._rows.shards:
            return
        if self._compressed is not None and self._touched is not None:
            before = self._compressed.payload_bytes
            self._compressed.average(number, self._touched.take())
            self._exchange.payloads_bytes.append(self._compressed.payload_bytes - before)
            return
        self._exchange.begin()
        self._apply_delayed()
        if self._touched is None:
            rows: list[Tensor | None] = [None] * len(self._rows.shards)
            # Upstream's own, which reduces in place.
            self._model.sync(include_optimizer_state=State.moments in self._state)
        else:
            touched = self._touched.take()
            rows, touching = self._agree_on_rows(touched.keys)
            self._average(rows, touching, touched)
        self._send_moments(rows)

    def _agree_on_rows(self, keys: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
        """Rows of each shard that any replica touched (None where all are averaged anyway), and how many did.

        Args:
            keys: what this rank touched, sorted.
        """
        if self._averages_all is not None and any(self._averages_all):
            own = self._rows.split(keys)
            kept = [rows + self._rows.starts[i] for i, rows in enumerate(own) if not self._averages_all[i]]
            keys = torch.cat([keys[:0], *kept])
        gathered = self._exchange.all_keys(keys)
        union = distinct(gathered, self._rows.num_rows)
        rows = self._rows.split(union)
        if self._averages_all is None:
            self._averages_all = self._choose(gathered, rows)
        touching: list[Tensor] = []
        if self._config.combine is Combine.touch_mean:
            count = torch.ones_like(gathered, dtype=torch.float32)
            counts = count.new_zeros(len(union)).index_add_(0, torch.searchsorted(union, gathered), count)
            touching = list(counts.split([len(part) for part in rows]))
        return [None if is_all else part for is_all, part in zip(self._averages_all, rows, strict=True)], touching

    def _choose(self, gathered: Tensor, union: list[Tensor]) -> list[bool]:
        """``auto``: for each shard whether averaging all rows sends fewer bytes than keys and touched rows.

        All replicas see the same keys and so choose alike. Bytes are those of a ring all-gather and all-reduce, less
        the factor (M - 1) / M that they have in common.
        """
        row_bytes = self._rows.row_bytes(self._state)
        narrow = 2 if self._config.wire_dtype is WireDtype.bf16 else 1
        choice = []
        for shard, keys, rows, size in zip(
            self._rows.shards, self._rows.split(gathered.sort().values), union, row_bytes, strict=True
        ):
            touched = self._exchange.key_bytes * len(keys) + 2 * len(rows) * size / narrow
            choice.append(touched >= 2 * len(shard.weight) * size)
        log.info(
            "averaging the touched rows of %d shards on this rank and all rows of the other %d, by bytes",
            choice.count(False),
            choice.count(True),
        )
        return choice

    def _average(self, rows: RowsByShard, touching: Sequence[Tensor], touched: Touched) -> None:
        """Merge the state of some rows."""
        now = self._rows.read(rows, self._state)
        if touched.before is None:
            self._exchange.mean(now.flat)
        else:
            self._combine_changes(now, rows, touching, touched)
        self._rows.write(rows, self._state, now.parts)

    def _combine_changes(self, now: RowValues, rows: RowsByShard, touching: Sequence[Tensor], touched: Touched) -> None:
        """Merge ``now`` in place from what changed in touched rows since all replicas were equal."""
        before = self._before(now, rows, touched)
        if self._config.combine is Combine.merged_gradient:
            self._merge_gradients(now.parts, before)
            return
        changed, factors, whole = [], [], []
        remaining = iter(zip(now.parts, before, strict=True))
        for index, tensors in enumerate(self._rows.tensors(self._state)):
            count = touching[index] if touching else None
            for number in range(len(tensors)):
                value, old = next(remaining)
                if old is None:
                    whole.append(value)
                else:
                    changed.append((value, old))
                    factors.append(share(self._config.combine, self._exchange.size, count, number > 0))
        changes = self._mean_changes([value - old for value, old in changed])
        for (value, old), change, factor in zip(changed, changes, factors, strict=True):
            if isinstance(factor, Tensor):
                factor = factor.view(-1, *[1] * (value.dim() - 1))
            torch.add(old, change * factor, out=value)
        self._exchange.mean_together(whole)

    def _before(self, now: RowValues, rows: RowsByShard, touched: Touched) -> list[Tensor | None]:
        """What each part of ``now`` was when all replicas were equal; None of shards of which all rows are averaged."""
        assert touched.before is not None
        own = self._rows.split(touched.keys)
        remaining, kept = iter(now.parts), iter(touched.before)
        before: list[Tensor | None] = []
        for index, tensors in enumerate(self._rows.tensors(self._state)):
            union = rows[index]
            for _ in tensors:
                value, mine = next(remaining), next(kept)
                # Rows that only other replicas touched hold what they held before.
                before.append(
                    None if union is None else value.index_copy(0, torch.searchsorted(union, own[index]), mine)
                )
        return before

    def _mean_changes(self, changes: list[Tensor]) -> list[Tensor]:
        """The mean of each over the replicas.

        A weight sent as bf16 would keep 8 bits of itself; of what changed in it they are enough.
        """
        mean = self._exchange.mean_bf16 if self._config.wire_dtype is WireDtype.bf16 else self._exchange.mean
        parts = mean(flatten(changes, self._rows.device)).split([change.numel() for change in changes])
        return [part.view_as(change) for part, change in zip(parts, changes, strict=True)]

    def _merge_gradients(self, now: list[Tensor], before: Sequence[Tensor | None]) -> None:
        """``merged_gradient``: one step on the gradient of the whole batch (formula: ``sync/reference.py``).

        Of each shard there are weights and one moment; moments are not sent.
        """
        pairs = [
            (weight, moment, old, old_moment)
            for weight, moment, old, old_moment in zip(now[::2], now[1::2], before[::2], before[1::2], strict=True)
            if old is not None and old_moment is not None
        ]
        steps = self._mean_changes([(weight - old) * self._divisor(moment) for weight, moment, old, _ in pairs])
        for (weight, moment, old, old_moment), mean in zip(pairs, steps, strict=True):
            step = mean * self._exchange.size
            squares = (step / self._optimizer.lr).square()
            torch.add(old_moment, squares if moment.dim() == 2 else squares.mean(dim=1), out=moment)
            torch.add(old, step / self._divisor(moment), out=weight)

    def _divisor(self, moment: Tensor) -> Tensor:
        """What AdaGrad divides a row's gradient by, [rows, columns] or, of row-wise moments, [rows, 1]."""
        root = moment.sqrt() + self._optimizer.eps
        return root if root.dim() == 2 else root.unsqueeze(1)

    def _send_moments(self, rows: list[Tensor | None]) -> None:
        """``delayed``: start to average the moments as they are now."""
        if self._config.moments is not SyncMoments.delayed:
            return
        snapshot = self._rows.read(rows, [State.moments])
        total = snapshot.flat.clone()
        self._delayed = DelayedMoments(rows, snapshot.flat, total, self._exchange.start_sum(total))

    def _apply_delayed(self) -> None:
        """``delayed``: take in what was sent at the last averaging (formula: ``sync/reference.py``)."""
        delayed = self._wait_for_delayed()
        if delayed is None:
            return
        now = self._rows.read(delayed.rows, [State.moments])
        corrected = now.flat + (delayed.mean - delayed.snapshot)
        # Where nothing was added the mean itself, so that rows which go on untouched are bit-equal on all replicas.
        now.flat.copy_(torch.where(now.flat == delayed.snapshot, delayed.mean, corrected))
        self._rows.write(delayed.rows, [State.moments], now.parts)
        self._delayed = None

    def _wait_for_delayed(self) -> DelayedMoments | None:
        if self._delayed is not None and self._delayed.work is not None:
            self._delayed.work.wait()
            self._delayed.mean.div_(self._exchange.size)
            self._delayed.work = None
        return self._delayed

    def _mean_over_gloo(self, tensors: list[Tensor]) -> None:
        """Upstream's hook: gloo has no average."""
        self._exchange.mean_together([tensor for tensor in tensors if tensor.numel() < REDUCED_ALONE])
        for tensor in tensors:
            if tensor.numel() >= REDUCED_ALONE:
                self._exchange.mean(tensor)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of this rank besides weights and moments; plain tensors, lists and numbers."""
        delayed = self._wait_for_delayed()
        return {
            "averages_all": self._averages_all,
            "touched": None if self._touched is None else self._touched.state_dict(),
            "compressed": None if self._compressed is None else self._compressed.state_dict(),
            "delayed": None
            if delayed is None
            else {"rows": delayed.rows, "snapshot": delayed.snapshot, "mean": delayed.mean},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict`` of the same rank in the same layout and config."""
        self._averages_all = state["averages_all"]
        if self._touched is not None:
            self._touched.load_state_dict(state["touched"])
        if self._compressed is not None and state.get("compressed") is not None:
            self._compressed.load_state_dict(state["compressed"])
        self._delayed = None if state["delayed"] is None else DelayedMoments(**state["delayed"])
