"""The placement that a sharding plan of ``sparse2d.train`` says."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparse2d.cost.placement import Cluster, Placement
from sparse2d.cost.workload import Floats, Workload
from sparse2d.errors import UserError
from sparse2d.plan import DATA_PARALLEL, Plan

# Occurrences of each row of a table in the data, for each table.
Counts = Sequence[NDArray[np.int64]]


def from_plan(workload: Workload, plan: Plan, cluster: Cluster) -> Placement:
    """The placement of a plan, whose tables the workload must have.

    Raises:
        UserError: if ranks or tables differ, or tables are replicated.
    """
    if plan.layout.group_size != cluster.group_size:
        raise UserError(f"the plan is for group_size={plan.layout.group_size}, this layout has {cluster.group_size}")
    index = {name: position for position, name in enumerate(workload.table_names)}
    theirs = {table.name: (table.rows, table.dim) for table in plan.tables}
    ours = {name: (int(workload.rows[i]), int(workload.dims[i])) for name, i in index.items()}
    if theirs != ours:
        name = next(name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name))
        raise UserError(f"table {name} is {theirs.get(name)} in the plan, {ours.get(name)} in the workload")
    shards: list[Sequence[float]] = []
    for table in plan.tables:
        if table.sharding == DATA_PARALLEL:
            raise UserError(f"table {table.name} is replicated in the plan, which the cost model does not know")
        fan = cluster.ranks_per_host if table.sharding in ("table_row_wise", "grid_shard") else 1
        for shard in table.shards:
            rows, columns = shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]
            shards.append((index[table.name], shard.rank, shard.rows[0], rows, columns, rows / table.rows, fan))
    array = np.asarray(shards, np.float64)
    return Placement(array[:, 0].astype(np.int64), array[:, 1].astype(np.int64), *array[:, 2:].T)


def with_counted_ids(placement: Placement, counts: Counts) -> Placement:
    """The same shards with the shares of ids that data have for them."""
    shards = zip(placement.table, placement.first_row, placement.rows, strict=True)
    found = [counts[t][int(first) : int(first + rows)].sum() / counts[t].sum() for t, first, rows in shards]
    return replace(placement, id_share=np.asarray(found))


def counted_distinct(placement: Placement, counts: Counts, draws: Floats) -> Floats:
    """Expected distinct rows on each shard if its table is looked up ``draws`` times, by samples that data hold.

    A step takes some of the data's samples and none of them twice: of a row that is in them c times, each occurrence
    is among the share f of all with probability f, and none of them with (1 - f) ** c.

    Args:
        placement: of the shards.
        counts: of the data.
        draws: lookups of each table.
    """

    def expected(table: int, first: int, rows: int) -> float:
        share = min(draws[table] / counts[table].sum(), 1.0)
        return float((1 - (1 - share) ** counts[table][first : first + rows]).sum())

    shards = zip(placement.table, placement.first_row, placement.rows, strict=True)
    return np.asarray([expected(int(t), int(first), int(rows)) for t, first, rows in shards])
