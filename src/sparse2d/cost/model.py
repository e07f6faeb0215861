"""The prediction for one layout: placement, volumes, memory and the step time of the slowest rank."""

from dataclasses import asdict, dataclass, replace

import numpy as np

from sparse2d.config import SyncRows
from sparse2d.cost.config import AveragingConfig, ConstantsConfig, HardwareConfig, LayoutConfig, SimulateConfig
from sparse2d.cost.network import Traffic, all_reduce_s, all_to_all_s, replicas_per_host
from sparse2d.cost.placement import HOST_COST, NETWORK_COST, ROW_PASSES, Cluster, Placement, place
from sparse2d.cost.volumes import Volumes, distinct_rows, volumes
from sparse2d.cost.workload import Floats, Workload, make_workload
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh

GB = 1e9
# Of the dense part's time; backward computes gradients of inputs and of weights.
FORWARD_SHARE = 1 / 3


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
        averaging_bytes: sent by the busiest rank in one averaging.
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
    averaging_bytes: float
    exchange: float

    @property
    def oom(self) -> bool:
        """Whether the peak exceeds what may be allocated."""
        return self.memory.total > self.usable

    @property
    def peak_memory_pct(self) -> float:
        """Of the rank's memory."""
        return 100 * self.memory.total / self.capacity


def predict(config: SimulateConfig, workload: Workload | None = None, balanced: bool = False) -> Prediction:
    """The prediction for the options' layout.

    Args:
        config: checked options.
        workload: made from them before, if it was.
        balanced: as if every rank had the mean of all ranks' work: what imbalance costs.

    Raises:
        UserError: if T and M, or tables and memory, do not go together.
    """
    workload = make_workload(config.workload) if workload is None else workload
    hardware, layout = config.hardware, config.parallelism
    mesh = _mesh(config)
    cluster = cluster_of(config, workload)
    placement = _placed(workload, cluster, layout)
    moved = volumes(workload, placement, cluster)
    averaged = _averaged_bytes(workload, placement, mesh, config.sync)
    if balanced:
        moved, averaged = moved.balanced(), np.full_like(averaged, averaged.mean())
    step, hidden, exchange, busy = _step(workload, moved, averaged, mesh, hardware, config.constants, config.sync)
    memory = _memory(workload, moved, averaged if config.sync.rows is not SyncRows.all else np.zeros(mesh.group_size))
    traffic = moved.pooled
    sent = traffic.sent_local + traffic.sent_remote + traffic.received_local + traffic.received_remote
    return Prediction(
        mesh=mesh,
        step=step,
        hidden=hidden,
        memory=memory,
        capacity=hardware.memory_gb * GB,
        usable=hardware.memory_gb * GB * hardware.usable_memory_share,
        imbalance={"lookups": _imbalance(moved.lookups), "bytes": _imbalance(sent), "time": _imbalance(busy)},
        qps=config.num_gpus * workload.batch_per_gpu / step.total,
        averaging_bytes=float(2 * (mesh.num_groups - 1) / mesh.num_groups * averaged.max()),
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


def _placed(workload: Workload, cluster: Cluster, layout: LayoutConfig) -> Placement:
    if cluster.rank_memory <= 0:
        raise UserError(
            f"workload.dense_memory_gb={workload.dense_memory / GB:g} leaves no memory for tables on a GPU; "
            "lower it or choose other hardware"
        )
    return place(workload, cluster, layout)


def _averaged_bytes(workload: Workload, placement: Placement, mesh: Mesh, sync: AveragingConfig) -> Floats:
    """Bytes that each rank of a group brings to an averaging over its M replicas [N]."""
    if mesh.num_groups == 1:
        return np.zeros(mesh.group_size)

    def total(rows: Floats, id_bytes: float) -> Floats:
        row_bytes = placement.columns * workload.weight_bytes + workload.state_bytes_per_row + id_bytes
        return np.bincount(placement.rank, rows * row_bytes, minlength=mesh.group_size).astype(np.float64)

    every = total(placement.rows, 0)
    if sync.rows is SyncRows.all:
        return every
    # The union over all replicas and the steps since the last averaging.
    draws = mesh.world_size * workload.batch_per_gpu * sync.interval * workload.pooling
    union = distinct_rows(workload.rows, workload.zipf, draws)
    share = placement.rows / workload.rows[placement.table]
    touched = total(union[placement.table] * share, 8)
    return np.where(touched < every, touched, every) if sync.rows is SyncRows.auto else touched


def _step(
    workload: Workload,
    moved: Volumes,
    averaged: Floats,
    mesh: Mesh,
    hardware: HardwareConfig,
    constants: ConstantsConfig,
    sync: AveragingConfig,
) -> tuple[StepTime, float, float, Floats]:
    """The step's phases, what is hidden, one exchange of pooled rows, and each rank's own busy time.

    Every collective waits for all, so each phase between two of them takes as long as on its slowest rank. Two
    streams: ids of the next batch travel beside the whole step; pooled rows and their gradients beside
    ``overlap_share`` of the dense forward and backward; dense gradients beside the rest of the backward.
    """
    gpus_per_host = min(hardware.gpus_per_host, mesh.world_size)
    local_peers = mesh.local_group_size(gpus_per_host) - 1
    hosts = mesh.world_size / gpus_per_host
    # Expected: all wait for the slowest host, if there is a slow one among them.
    slow = 1 + hardware.slow_host_excess * (1 - (1 - hardware.slow_host_share) ** hosts)

    def exchange(traffic: Traffic) -> float:
        return all_to_all_s(traffic, hardware, constants.alltoall_efficiency, local_peers, mesh.group_size - 1)

    memory_rate = hardware.memory_gb_per_s * GB * hardware.lookup_efficiency
    read = moved.lookup_bytes / memory_rate
    rate = hardware.peak_tflops * 1e12 * constants.dense_efficiency
    dense = slow * workload.batch_per_gpu * workload.dense_flops / rate
    forward, backward = dense * FORWARD_SHARE, dense * (1 - FORWARD_SHARE)
    pooled = exchange(moved.pooled)
    beside_forward = min(pooled, constants.overlap_share * forward)
    beside_backward = min(pooled, constants.overlap_share * backward)
    gradients = all_reduce_s(
        workload.dense_params * workload.dense_wire_bytes, mesh.world_size, gpus_per_host, hardware
    )
    gradients_hidden = min(gradients, backward - beside_backward)
    averaging = all_reduce_s(float(averaged.max()), mesh.num_groups, replicas_per_host(mesh, gpus_per_host), hardware)
    step = StepTime(
        input_dist=0.0,
        lookup=slow * float(read.max()),
        output_dist=pooled - beside_forward,
        dense=dense,
        gradient_dist=pooled - beside_backward,
        update=slow * float(read.max()) * (ROW_PASSES - 1),
        dense_all_reduce=gradients - gradients_hidden,
        averaging=averaging / sync.interval,
    )
    ids = exchange(moved.ids)
    step = replace(step, input_dist=max(0.0, ids - step.total))
    own = np.maximum(moved.pooled.sent_remote, moved.pooled.received_remote)
    busy = read * ROW_PASSES + 2 * own / (hardware.nic_gb_per_s * GB * constants.alltoall_efficiency)
    hidden = beside_forward + beside_backward + gradients_hidden + ids - step.input_dist
    return step, hidden, pooled, busy


def _memory(workload: Workload, moved: Volumes, averaging: Floats) -> Memory:
    parts = [moved.weights, moved.state, moved.id_buffers, moved.pooled_buffers, averaging]
    fullest = int(np.argmax(sum(parts)))
    weights, state, ids, pooled, averaged = (float(part[fullest]) for part in parts)
    return Memory(weights, state, ids, pooled, averaged, workload.dense_memory)


def _imbalance(values: Floats) -> float:
    mean = values.mean()
    return float(values.max() / mean) if mean > 0 else 1.0
