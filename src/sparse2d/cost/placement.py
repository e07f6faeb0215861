"""Which rank of a group holds which part of which table.

A greedy placement of our own (longest processing time first) by default: TorchRec's planner needs 41 s at 4096 ranks
even when each table has one possible kind, counts row-wise input N times and leaves it out of its total, knows no
averaging, and does not start without torch. A test compares both on a small case.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import ShardingKind
from sparse2d.cost.config import LayoutConfig
from sparse2d.cost.workload import LENGTH_BYTES, Floats, Workload
from sparse2d.errors import UserError

MIN_COLUMNS = 32
# Copies of the ids in memory at once: the batch computed, the one on its way (TorchRec's sparse pipeline), and what the
# fused backward makes of the former to group equal rows (linear, sorted, their origins and run lengths).
ID_COPIES = 2 + 4
# What a byte costs beside one read from GPU memory: over the network and inside a host. Fixed ratios, as of current
# clusters, so that a faster link never changes where tables lie.
NETWORK_COST = 40
HOST_COST = 5
# A table is split by columns while a part costs more than this share of what a rank has on average.
LARGE_PART = 0.25
# Rows are read in the forward pass, read and written in the backward pass.
ROW_PASSES = 3
GB = 1e9


class DoesNotFitError(UserError):
    """The tables are larger than the memory of a group, or a part of one larger than a rank's."""


@dataclass(frozen=True)
class Cluster:
    """What placement must know of the ranks of a group.

    Attributes:
        group_size: N.
        ranks_per_host: of the group.
        rank_memory: bytes for tables and what comes with them.
        averaging_cost: of a byte of a table in each step, in bytes read from memory; 0 without replicas.
    """

    group_size: int
    ranks_per_host: int
    rank_memory: float
    averaging_cost: float


@dataclass(frozen=True, eq=False)
class Placement:
    """Shards as parallel arrays [num_shards].

    Attributes:
        table: index of the shard's table.
        rank: of the group.
        first_row: of the table, held here.
        rows: held here.
        columns: held here.
        id_share: of the table's ids, how many are looked up here.
        fan: ranks of one host that sum their rows' parts before anything leaves it (1 = none).
    """

    table: NDArray[np.int64]
    rank: NDArray[np.int64]
    first_row: Floats
    rows: Floats
    columns: Floats
    id_share: Floats
    fan: Floats


def place(workload: Workload, cluster: Cluster, layout: LayoutConfig) -> Placement:
    """Place all tables over one group; equal inputs give the same arrays, computed once in a process.

    Raises:
        DoesNotFitError: if weights and optimizer state exceed the group's or a rank's memory.
    """
    key = _Key(workload.digest, cluster, tuple(layout.sharding), layout.split_rows_above_gb)
    return _place(key, _Held(workload))


@dataclass(frozen=True)
class _Key:
    digest: str
    cluster: Cluster
    sharding: tuple[ShardingKind, ...]
    split_rows_above_gb: float


class _Held:
    """Carries a workload past the cache: the key has its digest."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=256)
def _place(key: _Key, held: _Held) -> Placement:
    workload, cluster = held.workload, key.cluster
    n = cluster.group_size
    stored = stored_bytes(workload, workload.rows, workload.dims)
    if stored.sum() > n * cluster.rank_memory:
        raise DoesNotFitError(
            f"tables and optimizer state of {workload.name} take {stored.sum() / GB:.1f} GB, a group of {n} ranks has "
            f"{n * cluster.rank_memory / GB:.1f} GB for them ({cluster.rank_memory / GB:.1f} each); "
            "use fewer groups or more GPUs"
        )
    split_kind = next((k for k in key.sharding if k in (ShardingKind.row_wise, ShardingKind.table_row_wise)), None)
    threshold = min(key.split_rows_above_gb * GB, cluster.rank_memory / 2)
    split = (stored > threshold) & (split_kind is not None) & (workload.rows >= n) & (n > 1)
    shards = _Shards(workload, cluster)
    whole_hosts = split_kind is ShardingKind.table_row_wise and cluster.ranks_per_host > 1
    for table in np.flatnonzero(split):
        if not whole_hosts:
            shards.add_rows(int(table), np.arange(n), fan=1)
    if whole_hosts:
        shards.add_hosts(np.flatnonzero(split))
    shards.add_parts(_parts(workload, np.flatnonzero(~split), cluster, ShardingKind.column_wise in key.sharding))
    return shards.placement()


def shard_costs(
    workload: Workload,
    cluster: Cluster,
    table: NDArray[np.int64],
    rows: Floats,
    columns: Floats,
    share: Floats,
    fan: float = 1.0,
) -> Floats:
    """What shards cost their rank and step, in bytes read: rows, pooled rows sent both ways, weights averaged."""
    batch = workload.batch_per_gpu * cluster.group_size
    read = batch * workload.pooling[table] * share * columns * workload.weight_bytes * ROW_PASSES
    sent = 2 * batch * columns / fan * workload.wire_bytes
    averaged = stored_bytes(workload, rows, columns)
    return read + NETWORK_COST * sent + cluster.averaging_cost * averaged


def held_bytes(
    workload: Workload, cluster: Cluster, table: NDArray[np.int64], rows: Floats, columns: Floats, share: Floats
) -> Floats:
    """Memory that shards take of their rank: weights, optimizer state, copies of ids, pooled rows to be sent."""
    batch = workload.batch_per_gpu * cluster.group_size
    ids = ID_COPIES * batch * (share * workload.pooling[table] * workload.id_bytes + LENGTH_BYTES)
    return stored_bytes(workload, rows, columns) + ids + batch * columns * workload.activation_bytes


def stored_bytes(workload: Workload, rows: Floats, columns: Floats) -> Floats:
    """Weights and optimizer state of shards."""
    return rows * (columns * workload.weight_bytes + workload.state_bytes(columns))


def _parts(
    workload: Workload, tables: NDArray[np.int64], cluster: Cluster, by_columns: bool
) -> tuple[NDArray[np.int64], Floats]:
    """Tables that are not split by rows, each whole or in equal column ranges: (table, columns) of each part."""
    ones = np.ones(len(tables))
    cost = shard_costs(workload, cluster, tables, workload.rows[tables], workload.dims[tables], ones)
    pieces = ones
    if by_columns:
        mean = cost.sum() / cluster.group_size
        stored = stored_bytes(workload, workload.rows[tables], workload.dims[tables])
        wanted = np.ceil(np.maximum(cost / max(mean * LARGE_PART, 1e-300), stored / (cluster.rank_memory / 2)))
        most = np.maximum(1, workload.dims[tables] // MIN_COLUMNS)
        # Powers of two keep the ranges equal where dims are.
        pieces = 2 ** np.floor(np.log2(np.clip(wanted, 1, np.minimum(most, cluster.group_size))))
        pieces = np.where(workload.dims[tables] % pieces == 0, pieces, 1)
    count = pieces.astype(np.int64)
    return np.repeat(tables, count), np.repeat(workload.dims[tables] / pieces, count)


class _Shards:
    """Collects shards and keeps the ranks' loads."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._pieces: list[tuple[NDArray[Any], ...]] = []
        self._load = np.zeros(cluster.group_size)
        # Pooled rows of the own batch and their gradients are on every rank.
        received = 2 * workload.batch_per_gpu * workload.dims.sum() * workload.activation_bytes
        self._free = np.full(cluster.group_size, cluster.rank_memory - received)

    def add_rows(self, table: int, ranks: NDArray[np.int64], fan: int) -> None:
        """Spread the rows of a table equally over some ranks; the hottest id is on one of them."""
        workload, count = self._workload, len(ranks)
        edges: Floats = np.round(np.linspace(0, workload.rows[table], count + 1)).astype(np.float64)
        rows = np.diff(edges)
        hottest = workload.hottest_share[table]
        share = np.full(count, (1 - hottest) / count)
        # Ids are taken to be hashed: which rank has the hottest one is arbitrary, but the same in every run.
        share[(table * 2654435761) % count] += hottest
        columns = np.full(count, workload.dims[table])
        self._add(np.full(count, table), ranks, edges[:-1], rows, columns, share, float(fan))

    def add_hosts(self, tables: NDArray[np.int64]) -> None:
        """Give each table to the ranks of one host: the costliest first, to the host with the least load."""
        size = self._cluster.ranks_per_host
        starts = np.arange(0, self._cluster.group_size, size)
        for table in tables[np.argsort(-self._workload.table_bytes[tables], kind="stable")]:
            stored = self._workload.table_bytes[table] / size
            free = self._free[starts]
            fitting = free >= stored
            # Memory comes first: hosts hold few of these tables, and each is large.
            host = (
                int(np.argmin(np.where(fitting, self._load[starts], np.inf))) if fitting.any() else int(free.argmax())
            )
            self.add_rows(int(table), np.arange(starts[host], starts[host] + size), fan=size)

    def add_parts(self, parts: tuple[NDArray[np.int64], Floats]) -> None:
        """Give each part to the rank with the least load that can hold it, the costliest part first."""
        table, columns = parts
        workload = self._workload
        ones = np.ones(len(table))
        rows = workload.rows[table]
        cost = shard_costs(workload, self._cluster, table, rows, columns, ones)
        stored = stored_bytes(workload, rows, columns)
        for index in np.flatnonzero(stored > self._cluster.rank_memory)[:1]:
            raise DoesNotFitError(
                f"table {workload.table_names[table[index]]} takes {stored[index] / GB:.1f} GB on one rank, which has "
                f"{self._cluster.rank_memory / GB:.1f} GB; allow row_wise in parallelism.sharding"
            )
        held = held_bytes(workload, self._cluster, table, rows, columns, ones)
        chosen = np.zeros(len(table), np.int64)
        for index in np.argsort(-cost, kind="stable"):
            loads = np.where(self._free >= held[index], self._load, np.inf)
            rank = int(loads.argmin())
            if loads[rank] == np.inf:
                # Nothing has room: the memory verdict will show by how little.
                rank = int(self._free.argmax())
            chosen[index] = rank
            self._load[rank] += cost[index]
            self._free[rank] -= held[index]
        self._add(table, chosen, np.zeros(len(table)), rows, columns, ones, 1.0, place=False)

    def _add(
        self,
        table: NDArray[np.int64],
        rank: NDArray[np.int64],
        first_row: Floats,
        rows: Floats,
        columns: Floats,
        share: Floats,
        fan: float,
        place: bool = True,
    ) -> None:
        self._pieces.append((table, rank, first_row, rows, columns, share, np.full(len(table), fan)))
        if place:
            self._load[rank] += shard_costs(self._workload, self._cluster, table, rows, columns, share, fan)
            self._free[rank] -= held_bytes(self._workload, self._cluster, table, rows, columns, share)

    def placement(self) -> Placement:
        """All shards so far."""
        table, rank, *numbers = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        return Placement(table.astype(np.int64), rank.astype(np.int64), *numbers)
