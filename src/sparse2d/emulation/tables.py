"""M replicas of all tables in one process: lookups, row updates, and what the replicas become at an averaging."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparse2d.config import Combine, OptimizerConfig, SyncConfig, SyncMoments
from sparse2d.optimizers.rows import new_moments, update_rows
from sparse2d.parallel.tables import initial_rows
from sparse2d.sync import reference


@dataclass(frozen=True)
class Section:
    """Consecutive tables whose columns are cut alike: each of the S shards of a row has a row-wise moment of its own.

    Attributes:
        rows: of all tables, in the common numbering.
        num_shards: S.
        weight: [rows, M, dim], a view.
        moments: in the optimizer's shape, [rows x M x S, ...].
    """

    rows: range
    num_shards: int
    weight: Tensor
    moments: list[Tensor]

    @property
    def state(self) -> list[Tensor]:
        """Weights and moments as [rows, M, values of a row]: views."""
        height, num_groups, _ = self.weight.shape
        return [self.weight, *(moment.view(height, num_groups, -1) for moment in self.moments)]


class ReplicatedTables:
    """The rows of all tables in one tensor [rows, M, dim], so that one operation serves them all.

    A table of which S shards hold columns is cut in the same way here: its row is S rows of dim / S columns.

    Args:
        shapes: (rows, dim) of every table, by name, all of one dim.
        num_shards: S of every table, by name.
        num_groups: M; 1 where replicas are always equal.
        seed: of the initial weights.
        optimizer: which, and its numbers.
        moment_scale: c.
        sync: K, rule and moments.
        device: where they are.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        num_shards: Mapping[str, int],
        *,
        num_groups: int,
        seed: int,
        optimizer: OptimizerConfig,
        moment_scale: float,
        sync: SyncConfig,
        device: torch.device,
    ) -> None:
        self.num_groups = num_groups
        self._optimizer, self._moment_scale, self._sync = optimizer, moment_scale, sync
        self._step = 0
        self._touched: list[Tensor] = []
        self._snapshots: list[tuple[Tensor, list[Tensor]]] = []
        order = sorted(shapes, key=lambda name: num_shards[name])
        starts = torch.tensor([0, *(shapes[name][0] for name in order)]).cumsum(0).tolist()
        self._rows = {name: range(*bounds) for name, bounds in zip(order, pairwise(starts), strict=True)}
        (dim,) = {dim for _, dim in shapes.values()}
        self.weight = torch.empty((starts[-1], num_groups, dim), device=device)
        for name, rows in self._rows.items():
            for first, values in initial_rows(shapes, name, seed, range(len(rows))):
                start = rows.start + first
                self.weight[start : start + len(values)] = values.to(device).unsqueeze(1)
        self.sections = [self._section(size, num_shards) for size in sorted(set(num_shards.values()))]
        keeps_before = sync.combine not in (Combine.mean, Combine.gradient)
        # What all replicas held after the last averaging.
        self._before = [
            [part[:, 0].clone() for part in section.state] if keeps_before else [] for section in self.sections
        ]

    def _section(self, size: int, num_shards: Mapping[str, int]) -> Section:
        tables = [rows for name, rows in self._rows.items() if num_shards[name] == size]
        rows = range(tables[0].start, tables[-1].stop)
        weight = self.weight[rows.start : rows.stop]
        return Section(rows, size, weight, new_moments(weight.view(-1, weight.shape[2] // size), self._optimizer))

    def first_row(self, table: str) -> int:
        """The place of a table's first row in the common numbering."""
        return self._rows[table].start

    def lookup(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Each row as its group's replica holds it, [n, dim]; both arguments [n]."""
        return self.weight.view(-1, self.weight.shape[2]).index_select(0, rows * self.num_groups + groups)

    @torch.no_grad()
    def update(self, rows: Tensor, groups: Tensor, grad: Tensor) -> None:
        """One step of every group on the rows that it looked up.

        Args:
            rows: [n], with repeats.
            groups: which replica each of them is of, [n].
            grad: of each group's own loss, [n, dim]; a row's gradients are summed.
        """
        self._step += 1
        keys, inverse = (rows * self.num_groups + groups).unique(return_inverse=True)
        total = grad.new_zeros((len(keys), grad.shape[1])).index_add_(0, inverse, grad)
        bounds = self._bounds(keys, self.num_groups)
        for section, (first, last) in zip(self.sections, bounds, strict=True):
            own = keys[first:last] - section.rows.start * self.num_groups
            shards = torch.arange(section.num_shards, device=keys.device)
            columns = self.weight.shape[2] // section.num_shards
            update_rows(
                section.weight.view(-1, columns),
                section.moments,
                (own.unsqueeze(1) * section.num_shards + shards).flatten(),
                total[first:last].reshape(-1, columns),
                step=self._step,
                moment_scale=self._moment_scale,
                config=self._optimizer,
            )
        if self.num_groups > 1:
            self._touched.append(keys)

    def _bounds(self, keys: Tensor, per_row: int) -> list[tuple[int, int]]:
        """Where each section's part of sorted keys, ``per_row`` for each row, begins and ends."""
        ends = torch.tensor([0, *(section.rows.stop for section in self.sections)], device=keys.device)
        return list(pairwise(torch.searchsorted(keys, ends * per_row).tolist()))

    @torch.no_grad()
    def average(self) -> None:
        """Merge the replicas of every row that any group looked up since the last call (``sync/reference.py``)."""
        if self.num_groups == 1:
            return
        keys = torch.cat(self._touched).unique() if len(self._touched) > 1 else self._touched[0]
        self._touched = []
        rows, place = torch.unique_consecutive(keys // self.num_groups, return_inverse=True)
        touched = torch.zeros((self.num_groups, len(rows)), dtype=torch.bool, device=keys.device)
        touched[keys % self.num_groups, place] = True
        for section, snapshot in zip(self.sections, self._snapshots, strict=False):
            _apply_late(section, *snapshot)
        self._snapshots = []
        for number, (section, (first, last)) in enumerate(zip(self.sections, self._bounds(rows, 1), strict=True)):
            own = rows[first:last] - section.rows.start
            self._combine(number, own, touched[:, first:last])
            if self._sync.moments is SyncMoments.delayed:
                self._snapshots.append((own, [moment[own] for moment in section.state[1:]]))

    def _combine(self, number: int, rows: Tensor, touched: Tensor) -> None:
        """Merge the weights of some rows of a section, and their moments if they go with the weights."""
        state, rule = self.sections[number].state, self._sync.combine
        merged = state if self._sync.moments is SyncMoments.with_weights else state[:1]
        replicas = [values.index_select(0, rows).transpose(0, 1) for values in merged]
        before = [values.index_select(0, rows) for values in self._before[number]]
        if rule is Combine.mean:
            results = [reference.mean(values) for values in replicas]
        elif rule is Combine.delta_sum:
            results = [reference.delta_sum(*pair) for pair in zip(before, replicas, strict=True)]
        elif rule is Combine.touch_mean:
            weights, *moments = zip(before, replicas, strict=True)
            results = [reference.touch_mean_weights(*weights, touched)]
            results += [reference.touch_mean_moments(*moment, touched) for moment in moments]
        else:
            results = self._merge_gradients(number, before, replicas)
        for index, (values, result) in enumerate(zip(merged, results, strict=True)):
            values.index_copy_(0, rows, result.unsqueeze(1).expand(-1, self.num_groups, -1))
            if before:
                self._before[number][index].index_copy_(0, rows, result)

    def _merge_gradients(self, number: int, before: list[Tensor], replicas: list[Tensor]) -> list[Tensor]:
        """``merged_gradient`` of a section, each shard of columns with its own moment."""
        shards = self.sections[number].num_shards
        old, old_moment, weights, moments = (
            values.reshape(*values.shape[:-1], shards, -1) for values in (*before, *replicas)
        )
        lr, eps = self._optimizer.lr, self._optimizer.eps
        merged = reference.merged_gradient((old, old_moment), (weights, moments), lr=lr, eps=eps)
        return [values.flatten(1) for values in merged]

    def table(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """Weights [rows, M, dim] of one table and its moments, row-wise ones spread over their columns: copies."""
        rows = self._rows[name]
        section = next(section for section in self.sections if rows.start in section.rows)
        own = slice(rows.start - section.rows.start, rows.stop - section.rows.start)
        dim = self.weight.shape[2]
        weight, *moments = (part[own] for part in section.state)
        return weight.clone(), [part.repeat_interleave(dim // part.shape[2], dim=2) for part in moments]


def _apply_late(section: Section, rows: Tensor, kept: list[Tensor]) -> None:
    """Take in the mean of what the moments of some rows were at the last averaging."""
    for moment, then in zip(section.state[1:], kept, strict=True):
        now = list(moment[rows].unbind(1))
        moment[rows] = torch.stack(reference.delayed_moments(now, list(then.unbind(1))), dim=1)
