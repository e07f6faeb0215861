"""What each rank of a group reads, sends, receives and holds in one step."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sparse2d.cost.config import Collectives
from sparse2d.cost.network import Traffic
from sparse2d.cost.placement import ID_COPIES, Cluster, Placement
from sparse2d.cost.workload import LENGTH_BYTES, Floats, Workload, harmonic


@dataclass(frozen=True, eq=False)
class Volumes:
    """Per rank of one group [N]; bytes unless said otherwise.

    Attributes:
        lookups: rows looked up, as a count.
        lookup_bytes: read from tables in the forward pass.
        ids: input distribution.
        pooled: output distribution of the forward pass; the backward pass sends it the other way.
        partial: of that, what each rank sends each other one: its sums over its rows of tables split over all ranks.
        weights: of the tables.
        state: of their optimizer.
        id_buffers: ids received, all copies.
        pooled_buffers: pooled rows before they are sent (or gradients received) and after they are received.
    """

    lookups: Floats
    lookup_bytes: Floats
    ids: Traffic
    pooled: Traffic
    partial: float
    weights: Floats
    state: Floats
    id_buffers: Floats
    pooled_buffers: Floats

    def balanced(self) -> "Volumes":
        """Every rank with the mean of all: what it would be without imbalance."""

        def mean(value: Floats) -> Floats:
            return np.full_like(value, value.mean())

        def same(traffic: Traffic) -> Traffic:
            return Traffic(*(mean(getattr(traffic, field.name)) for field in fields(Traffic)))

        def balanced(value: Any) -> Any:
            return same(value) if isinstance(value, Traffic) else value if isinstance(value, float) else mean(value)

        means = [balanced(getattr(self, field.name)) for field in fields(self)]
        return Volumes(*means)


def volumes(workload: Workload, placement: Placement, cluster: Cluster) -> Volumes:
    """The volumes of one step; all bytes sent are received.

    A shard of any kind gets its share of each rank's ids, and gives each rank a pooled vector of its columns for
    each of the rank's samples. With a fan (rows of a table over the ranks of one host) those ranks first sum their
    vectors, each for its part of the samples.
    """
    n, batch = cluster.group_size, workload.batch_per_gpu
    rank, fan = placement.rank, placement.fan

    def total(values: Floats) -> Floats:
        return np.bincount(rank, values, minlength=n).astype(np.float64)

    pooling = workload.pooling[placement.table]
    # From one rank's batch, for this shard.
    ids = batch * (placement.id_share * pooling * workload.id_bytes + LENGTH_BYTES)
    vectors = batch * placement.columns
    lookups = n * batch * placement.id_share * pooling
    wire = vectors * workload.wire_bytes
    # Summing inside the host: each of the fan ranks keeps 1/fan of the n vectors and sends the rest to its neighbours.
    inside = n * wire * (fan - 1) / fan
    return Volumes(
        lookups=total(lookups),
        lookup_bytes=total(lookups * placement.columns * workload.weight_bytes),
        ids=_inwards(total(ids), cluster),
        pooled=_outwards(total(wire / fan), total(inside), cluster),
        partial=float(wire[(fan == 1) & (placement.rows < workload.rows[placement.table])].sum() / n),
        weights=total(placement.rows * placement.columns * workload.weight_bytes),
        state=total(placement.rows * workload.state_bytes(placement.columns)),
        id_buffers=ID_COPIES * total(n * ids),
        # Received rows and their gradients have the size of the rank's own batch.
        pooled_buffers=workload.activation_bytes * (total(n * vectors) + 2 * batch * workload.dims.sum()),
    )


def lookup_bytes(moved: Volumes, cluster: Cluster, collectives: Collectives) -> Floats:
    """Bytes that each rank sends for the lookups of a step: ids, pooled rows, and gradients of those it received [N].

    Left out are the few numbers that announce how many ids come. On gloo a rank sends its partial sums twice.
    """
    twice = collectives is Collectives.gloo
    out = moved.pooled.sent + (cluster.group_size - 1) * moved.partial * twice
    sent: Floats = moved.ids.sent + out + moved.pooled.received
    return sent


def evenly(to_each: float, cluster: Cluster) -> Traffic:
    """Traffic where every rank sends every other one the same."""
    return _outwards(np.full(cluster.group_size, to_each), np.zeros(cluster.group_size), cluster)


def _outwards(to_each: Floats, inside: Floats, cluster: Cluster) -> Traffic:
    """Traffic where a rank sends ``to_each`` to each other rank, and ``inside`` around among those of its host."""
    n, local = cluster.group_size, cluster.ranks_per_host
    host = np.repeat(to_each.reshape(-1, local).sum(1), local)
    remote = to_each.sum() - host
    return Traffic(
        sent_local=(local - 1) * to_each + inside,
        sent_remote=(n - local) * to_each,
        received_local=host - to_each + inside,
        # Without what rounding leaves of nothing.
        received_remote=np.where(remote > 1e-9 * host, remote, 0.0),
    )


def _inwards(from_each: Floats, cluster: Cluster) -> Traffic:
    """Traffic where a rank gets ``from_each`` from each other rank: the other way round."""
    out = _outwards(from_each, np.zeros_like(from_each), cluster)
    return Traffic(out.received_local, out.received_remote, out.sent_local, out.sent_remote)


def distinct_rows(rows: Floats, zipf: Floats, draws: Floats) -> Floats:
    """Expected number of distinct rows among ``draws`` independent Zipf draws from tables of ``rows`` rows, each [n].

    Sums 1 - exp(-draws p_k) over k on a grid that is exact for the first rows and geometric beyond.
    """
    edges = np.concatenate([np.arange(33.0), np.geomspace(32, np.maximum(rows.max(), 33), 200)[1:]])
    low, high = np.minimum(edges[:-1, None], rows), np.minimum(edges[1:, None], rows)
    middle = np.maximum((low + high + 1) / 2, 1)
    probability = middle**-zipf / harmonic(rows, zipf)
    expected: Floats = ((high - low) * -np.expm1(-draws * probability)).sum(0)
    return np.minimum(expected, np.minimum(rows, draws))
