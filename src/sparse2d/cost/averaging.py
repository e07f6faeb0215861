"""What the replicas of a shard send to average their rows: all rows, or those that any replica looked up."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparse2d.config import SyncRows
from sparse2d.cost.config import AveragingConfig
from sparse2d.cost.placement import Placement
from sparse2d.cost.volumes import distinct_rows
from sparse2d.cost.workload import Floats, Workload
from sparse2d.mesh import Mesh

# A row's number among those of a rank (see ``sync/collectives.py``).
KEY_BYTES = 4


@dataclass(frozen=True, eq=False)
class Averaged:
    """What each rank of a group brings to one averaging over its M replicas [N], in bytes.

    Attributes:
        values: weights and moments, all-reduced.
        keys: numbers of the rows that this rank touched, all-gathered.
    """

    values: Floats
    keys: Floats

    def sent(self, num_groups: int) -> Floats:
        """Bytes that each rank sends around the rings."""
        sent: Floats = 2 * (num_groups - 1) / num_groups * self.values + (num_groups - 1) * self.keys
        return sent

    def buffers(self, num_groups: int) -> Floats:
        """Copies of touched rows and all replicas' keys; all rows are reduced in place."""
        return np.where(self.keys > 0, self.values + num_groups * self.keys, 0.0)

    def balanced(self) -> "Averaged":
        """Every rank with the mean of all."""
        return Averaged(*(np.full_like(part, part.mean()) for part in (self.values, self.keys)))


# Expected distinct rows on each shard, given how often each table is looked up.
Distinct = Callable[[Floats], Floats]


def zipf_distinct(workload: Workload, placement: Placement) -> Distinct:
    """Under Zipf's law, the distinct rows of a table being spread over its shards as its rows are."""

    def distinct(draws: Floats) -> Floats:
        of_table = distinct_rows(workload.rows, workload.zipf, draws)
        found: Floats = of_table[placement.table] * placement.rows / workload.rows[placement.table]
        return found

    return distinct


def averaged(
    workload: Workload, placement: Placement, mesh: Mesh, sync: AveragingConfig, distinct: Distinct
) -> Averaged:
    """Volumes of one averaging.

    Args:
        workload: whose rows, and how often they are looked up.
        placement: on one group.
        mesh: M and N.
        sync: which rows, and the steps since the last averaging.
        distinct: expected distinct rows of each shard.
    """

    def total(of_shards: Floats) -> Floats:
        return np.bincount(placement.rank, of_shards, minlength=mesh.group_size).astype(np.float64)

    nothing = np.zeros(len(placement.rank))
    row_bytes = placement.columns * workload.weight_bytes
    if sync.averages_moments:
        row_bytes = row_bytes + workload.state_bytes(placement.columns)
    every = placement.rows * row_bytes
    if mesh.num_groups == 1:
        return Averaged(total(nothing), total(nothing))
    if sync.rows is SyncRows.all:
        return Averaged(total(every), total(nothing))
    # Of a group's ranks since the last averaging.
    draws = mesh.group_size * workload.batch_per_gpu * sync.interval * workload.pooling
    keys = KEY_BYTES * distinct(draws)
    union = row_bytes * distinct(mesh.num_groups * draws)
    if sync.rows is SyncRows.touched:
        return Averaged(total(union), total(keys))
    # As ``sync/averaging.py`` chooses, by the bytes of a ring without the factor (M - 1) / M.
    takes_all = mesh.num_groups * keys + 2 * union >= 2 * every
    return Averaged(total(np.where(takes_all, every, union)), total(np.where(takes_all, 0.0, keys)))
