"""The prediction for one layout: placement, volumes, memory and the step time of the slowest rank."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sparse2d.config import Pipeline, SyncRows
from sparse2d.cost.averaging import Averaged, averaged, zipf_distinct
from sparse2d.cost.config import Collectives, LayoutConfig, SimulateConfig
from sparse2d.cost.network import all_reduce_s, all_to_all_s, replicas_per_host, ring_s
from sparse2d.cost.placement import HOST_COST, NETWORK_COST, ROW_PASSES, Cluster, Placement, place
from sparse2d.cost.planned import Counts, counted_distinct, from_plan, with_counted_ids
from sparse2d.cost.volumes import Volumes, evenly, lookup_bytes, volumes
from sparse2d.cost.workload import Floats, Workload, make_workload
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh
from sparse2d.plan import Plan, read_plan

GB = 1e9
# Of the dense part's time; backward computes gradients of inputs and of weights.
FORWARD_SHARE = 1 / 3
# DistributedDataParallel reduces gradients in buckets of up to so much.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the critical path; what runs beside something else is in ``hidden``."""

    input_dist: float
    lookup: float
    output_dist: float
    dense: float
    gradient_dist: float
    update: float
    dense_all_reduce: float
    averaging: float

    @property
    def total(self) -> float:
        """Of the step."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: float
    optimizer_state: float
    id_buffers: float
    pooled_buffers: float
    averaging: float
    dense: float

    @property
    def total(self) -> float:
        """Peak."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, eq=False)
class Sent:
    """Bytes that each rank of a group sends [N]: for lookups in a step, in one averaging; for dense gradients."""

    lookup: Floats
    averaging: Floats
    dense: float


@dataclass(frozen=True)
class Prediction:
    """What the model says about one layout (label ``modelled``).

    Attributes:
        mesh: T, M, N.
        step: seconds of a step.
        hidden: seconds of communication that run beside computation.
        memory: of the fullest rank.
        capacity: bytes that a rank has.
        usable: bytes of them that may be allocated.
        imbalance: max / mean over the ranks of a group: lookups, bytes (sent and received), time.
        qps: samples a second of all ranks.
        sent: bytes that ranks send.
        exchange: seconds of one all-to-all of pooled rows, hidden or not.
    """

    mesh: Mesh
    step: StepTime
    hidden: float
    memory: Memory
    capacity: float
    usable: float
    imbalance: dict[str, float]
    qps: float
    sent: Sent
    exchange: float

    @property
    def oom(self) -> bool:
        """Whether the peak exceeds what may be allocated."""
        return self.memory.total > self.usable

    @property
    def peak_memory_pct(self) -> float:
        """Of the rank's memory."""
        return 100 * self.memory.total / self.capacity


def predict(
    config: SimulateConfig,
    workload: Workload | None = None,
    balanced: bool = False,
    plan: Plan | None = None,
    counts: Counts | None = None,
) -> Prediction:
    """The prediction for the options' layout.

    Args:
        config: checked options.
        workload: made from them before, if it was.
        balanced: as if every rank had the mean of all ranks' work: what imbalance costs.
        plan: that places the tables, instead of a placement of our own.
        counts: how often each row of each table is in the data, instead of Zipf's law.

    Raises:
        UserError: if T and M, or tables and memory, do not go together.
    """
    workload = make_workload(config.workload) if workload is None else workload
    hardware = config.hardware
    mesh = _mesh(config)
    cluster = cluster_of(config, workload)
    placement = _placed(workload, cluster, config.parallelism, plan)
    distinct = zipf_distinct(workload, placement)
    if counts is not None:
        placement = with_counted_ids(placement, counts)
        distinct = partial(counted_distinct, placement, counts)
    moved = volumes(workload, placement, cluster)
    averages = averaged(workload, placement, mesh, config.sync, distinct)
    sent = Sent(
        lookup=lookup_bytes(moved, cluster, hardware.collectives),
        averaging=averages.sent(mesh.num_groups),
        dense=2 * (1 - 1 / mesh.world_size) * workload.dense_params * workload.dense_wire_bytes,
    )
    if balanced:
        moved, averages = moved.balanced(), averages.balanced()
    step, hidden, exchange, busy = _step(workload, moved, averages, mesh, cluster, config)
    memory = _memory(workload, moved, averages.buffers(mesh.num_groups))
    traffic = moved.pooled
    moving = traffic.sent_local + traffic.sent_remote + traffic.received_local + traffic.received_remote
    return Prediction(
        mesh=mesh,
        step=step,
        hidden=hidden,
        memory=memory,
        capacity=hardware.memory_gb * GB,
        usable=hardware.memory_gb * GB * hardware.usable_memory_share,
        imbalance={"lookups": _imbalance(moved.lookups), "bytes": _imbalance(moving), "time": _imbalance(busy)},
        qps=config.num_gpus * workload.batch_per_gpu / step.total,
        sent=sent,
        exchange=exchange,
    )


def _mesh(config: SimulateConfig) -> Mesh:
    return Mesh(config.num_gpus, config.parallelism.num_groups, config.parallelism.replicas)


def cluster_of(config: SimulateConfig, workload: Workload) -> Cluster:
    """What placement must know of one group of the layout."""
    mesh, hardware, sync = _mesh(config), config.hardware, config.sync
    gpus_per_host = min(hardware.gpus_per_host, mesh.world_size)
    # What is averaged by touched rows does not follow the table's size, so that its size is no matter of balance.
    averages = mesh.num_groups > 1 and sync.rows is SyncRows.all
    sharing = replicas_per_host(mesh, gpus_per_host)
    link_cost = HOST_COST if sharing >= mesh.num_groups else max(HOST_COST, NETWORK_COST / sharing)
    return Cluster(
        group_size=mesh.group_size,
        ranks_per_host=mesh.local_group_size(gpus_per_host),
        rank_memory=hardware.memory_gb * GB * hardware.usable_memory_share - workload.dense_memory,
        averaging_cost=2 * (1 - 1 / mesh.num_groups) * link_cost / sync.interval if averages else 0.0,
    )


def _placed(workload: Workload, cluster: Cluster, layout: LayoutConfig, plan: Plan | None) -> Placement:
    if cluster.rank_memory <= 0:
        raise UserError(
            f"workload.dense_memory_gb={workload.dense_memory / GB:g} leaves no memory for tables on a GPU; "
            "lower it or choose other hardware"
        )
    if plan is not None:
        return from_plan(workload, plan, cluster)
    if layout.plan_file is None:
        return place(workload, cluster, layout)
    try:
        return from_plan(workload, read_plan(Path(layout.plan_file)), cluster)
    except UserError as error:
        raise UserError(f"parallelism.plan_file={layout.plan_file}: {error}") from None


def _step(
    workload: Workload, moved: Volumes, averages: Averaged, mesh: Mesh, cluster: Cluster, config: SimulateConfig
) -> tuple[StepTime, float, float, Floats]:
    """The step's phases, what is hidden, one exchange of pooled rows, and each rank's own busy time.

    Every collective waits for all, so each phase between two of them takes as long as on its slowest rank. Two
    streams: ids of the next batch travel beside the whole step; pooled rows and their gradients beside
    ``overlap_share`` of the dense forward and backward; dense gradients beside the rest of the backward, but for
    the last bucket, which is full only when the backward is over.
    """
    hardware, constants = config.hardware, config.constants
    gpus_per_host = min(hardware.gpus_per_host, mesh.world_size)
    hosts = mesh.world_size / gpus_per_host
    # Expected: all wait for the slowest host, if there is a slow one among them.
    slow = 1 + hardware.slow_host_excess * (1 - (1 - hardware.slow_host_share) ** hosts)

    memory_rate = hardware.memory_gb_per_s * GB * hardware.lookup_efficiency
    read = moved.lookup_bytes / memory_rate
    rate = hardware.peak_tflops * 1e12 * constants.dense_efficiency
    dense = slow * workload.batch_per_gpu * workload.dense_flops / rate
    forward, backward = dense * FORWARD_SHARE, dense * (1 - FORWARD_SHARE)
    pooled_out, pooled_back = _exchanges(moved, mesh, cluster, config)
    beside_forward = min(pooled_out, constants.overlap_share * forward)
    beside_backward = min(pooled_back, constants.overlap_share * backward)
    gradient_bytes = workload.dense_params * workload.dense_wire_bytes
    gradients = all_reduce_s(gradient_bytes, mesh.world_size, gpus_per_host, hardware)
    last = all_reduce_s(min(gradient_bytes, BUCKET_BYTES), mesh.world_size, gpus_per_host, hardware)
    gradients_hidden = max(0.0, min(gradients - last, backward - beside_backward))
    local_replicas = replicas_per_host(mesh, gpus_per_host)
    averaging = ring_s(float(averages.sent(mesh.num_groups).max()), mesh.num_groups, local_replicas, hardware, passes=2)
    step = StepTime(
        input_dist=0.0,
        lookup=slow * float(read.max()),
        output_dist=pooled_out - beside_forward,
        dense=dense,
        gradient_dist=pooled_back - beside_backward,
        update=slow * float(read.max()) * (ROW_PASSES - 1),
        dense_all_reduce=gradients - gradients_hidden,
        averaging=averaging / config.sync.interval,
    )
    ids = all_to_all_s(moved.ids, hardware, constants.alltoall_efficiency, mesh)
    beside_step = 0.0 if config.pipeline is Pipeline.none else step.total
    step = replace(step, input_dist=max(0.0, ids - beside_step))
    own = np.maximum(moved.pooled.sent_remote, moved.pooled.received_remote) * hardware.gpus_per_nic
    busy = read * ROW_PASSES + 2 * own / (hardware.nic_gb_per_s * GB * constants.alltoall_efficiency)
    hidden = beside_forward + beside_backward + gradients_hidden + ids - step.input_dist
    return step, hidden, pooled_out, busy


def _exchanges(moved: Volumes, mesh: Mesh, cluster: Cluster, config: SimulateConfig) -> tuple[float, float]:
    """Seconds of the exchange of pooled rows, and of their gradients.

    On gloo, tables split over all ranks are all-reduced in a ring, twice their bytes, and their gradients gathered.
    """
    hardware, efficiency = config.hardware, config.constants.alltoall_efficiency
    if hardware.collectives is Collectives.nccl:
        seconds = all_to_all_s(moved.pooled, hardware, efficiency, mesh)
        return seconds, seconds
    others = mesh.group_size - 1
    rest = moved.pooled - evenly(moved.partial, cluster)
    direct = all_to_all_s(rest, hardware, efficiency, mesh) if rest.sent.any() else 0.0
    ring = partial(ring_s, ranks=mesh.group_size, ranks_per_host=cluster.ranks_per_host, hardware=hardware)
    reduced, gathered = ring(2 * others * moved.partial, passes=2), ring(others * moved.partial)
    return direct + reduced, direct + gathered


def _memory(workload: Workload, moved: Volumes, averaging: Floats) -> Memory:
    parts = [moved.weights, moved.state, moved.id_buffers, moved.pooled_buffers, averaging]
    fullest = int(np.argmax(sum(parts)))
    weights, state, ids, pooled, averaged = (float(part[fullest]) for part in parts)
    return Memory(weights, state, ids, pooled, averaged, workload.dense_memory)


def _imbalance(values: Floats) -> float:
    mean = values.mean()
    return float(values.max() / mean) if mean > 0 else 1.0
