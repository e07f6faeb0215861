"""Typed options of ``python -m sparse2d.simulate``; values are in ``conf/simulate.yaml`` and its groups."""

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from sparse2d.config import Pipeline, Replicas, ShardingKind, SyncMoments, SyncRows
from sparse2d.errors import UserError


class Task(Enum):
    """What ``simulate`` does: one layout, a table of them, or one of the questions about the model itself."""

    point = "point"
    sweep = "sweep"
    recommend = "recommend"
    calibrate = "calibrate"
    validate = "validate"
    validate_runs = "validate_runs"


class Collectives(Enum):
    """Who runs collectives: gloo reduces and scatters by an all-reduce of which each rank keeps its part."""

    nccl = "nccl"
    gloo = "gloo"


class TableSource(Enum):
    """Where the tables of a workload come from."""

    listed = "listed"
    generated = "generated"
    csv = "csv"
    model = "model"


@dataclass
class GeneratedTables:
    """Tables drawn from a seed: sizes follow a power law, the largest tables have the widest rows."""

    seed: int = 0
    num_tables: int = 1000
    # Bytes of all weights, in GB (1e9).
    total_gb: float = 1700.0
    # Bytes of the k-th largest table are proportional to k ** -size_exponent.
    size_exponent: float = 0.9
    # The largest tables get the first dim, and so on; shares of the number of tables.
    dims: list[int] = field(default_factory=lambda: [256, 128, 64])
    dim_shares: list[float] = field(default_factory=lambda: [0.1, 0.4, 0.5])
    # Ids of a sample for a table: log-normal, rounded, clipped to [1, pooling_max].
    pooling_median: float = 5.0
    pooling_sigma: float = 1.2
    pooling_max: float = 200.0


@dataclass
class WorkloadConfig:
    """Tables, batch and dense part of a model."""

    name: str = MISSING
    source: TableSource = MISSING
    # Samples of each GPU and step.
    batch_per_gpu: int = MISSING
    # Of the dense part, forward and backward, for one sample; null = from the model (source=model only).
    dense_tflop_per_sample: float | None = None
    # Parameters of the dense part, in millions; null = from the model.
    dense_mparams: float | None = None
    # Memory that does not depend on the layout: dense weights, gradients, optimizer, activations, buffers.
    dense_memory_gb: float = 0.0
    # Bytes of a weight, of a pooled value in memory, of one on the wire, and of a dense gradient on the wire.
    weight_bytes: int = 4
    activation_bytes: int = 4
    wire_bytes: int = 4
    dense_wire_bytes: int = 4
    # Bytes of an id on the wire and in memory.
    id_bytes: int = 8
    # Optimizer state of a row of a shard (row-wise AdaGrad: one fp32), and of each of its values (AdaGrad 4, Adam 8);
    # with source=model it is the training config's.
    state_bytes_per_row: int = 4
    state_bytes_per_value: int = 0
    # Zipf exponent of the ids of a table: 0 = uniform.
    zipf_exponent: float = 1.05
    # source=listed: one entry for each table; a single entry holds for all.
    rows: list[int] = field(default_factory=list)
    dims: list[int] = field(default_factory=list)
    pooling: list[float] = field(default_factory=list)
    # source=generated.
    generated: GeneratedTables = field(default_factory=GeneratedTables)
    # source=csv: a file with columns rows, dim, pooling and, if wanted, name and zipf_exponent.
    path: str | None = None
    # source=model: overrides of a training config, as for sparse2d.train.
    train: list[str] = field(default_factory=list)
    # Model whose published points stand beside the modelled ones: exfm or ctr; null = none.
    paper: str | None = None
    # Published points that the tables were chosen to meet, "model num_gpus num_groups": these are never predictions.
    fitted_on: list[str] = field(default_factory=list)
    # What had to be assumed, in words; printed by validate.
    assumptions: list[str] = field(default_factory=list)


@dataclass
class HardwareConfig:
    """A cluster of equal hosts. GB is 1e9 bytes; bandwidths are of one direction."""

    name: str = MISSING
    memory_gb: float = MISSING
    # Share of it that allocations may reach: the rest goes to the context, NCCL and fragmentation.
    usable_memory_share: float = MISSING
    memory_gb_per_s: float = MISSING
    # Share of that which table lookups reach.
    lookup_efficiency: float = MISSING
    peak_tflops: float = MISSING
    gpus_per_host: int = MISSING
    # Of one GPU to the others of its host, and the share of it that collectives reach.
    host_gb_per_s: float = MISSING
    host_efficiency: float = MISSING
    # Of one network interface, and the share of it that rings between hosts reach.
    nic_gb_per_s: float = MISSING
    nic_efficiency: float = MISSING
    # Neighbouring GPUs of a host that share an interface.
    gpus_per_nic: int = 1
    collectives: Collectives = Collectives.nccl
    # Message to one peer at which an all-to-all reaches half of its rate.
    half_rate_message_kb: float = MISSING
    # Of one hop of a collective.
    latency_us: float = MISSING
    # Hosts of a group at which congestion has halved the rate of all-to-alls; null = none is known.
    congestion_half_hosts: float | None = None
    # Share of hosts that compute slower, and by how much: a step waits for the slowest host.
    slow_host_share: float = 0.0
    slow_host_excess: float = 0.0
    # Where each number is from.
    sources: list[str] = field(default_factory=list)


@dataclass
class ConstantsConfig:
    """The free constants: what no data sheet tells. ``FREE`` has their plausible ranges."""

    # Share of the peak FLOP/s that the dense part reaches.
    dense_efficiency: float = MISSING
    # Share of the network interface's rate that all-to-alls of large messages reach.
    alltoall_efficiency: float = MISSING
    # Share of the dense part's time during which all-to-alls of pooled rows can run beside it.
    overlap_share: float = MISSING
    # Published points that they were fitted on: "model num_gpus num_groups".
    fitted_on: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FreeConstant:
    """A constant that may be fitted: its meaning, its plausible range, and its value where nothing is known."""

    meaning: str
    low: float
    high: float
    assumed: float


# The unit of each is a share. In this order they are freed, one for each point to fit.
FREE = {
    "dense_efficiency": FreeConstant("share of peak FLOP/s in the dense part", 0.05, 0.8, 0.35),
    "alltoall_efficiency": FreeConstant("share of the NIC's rate in all-to-alls", 0.2, 1.0, 0.6),
    "overlap_share": FreeConstant("share of dense time beside all-to-alls", 0.0, 0.8, 0.3),
}


MODELLED = (ShardingKind.table_wise, ShardingKind.column_wise, ShardingKind.row_wise, ShardingKind.table_row_wise)


@dataclass
class LayoutConfig:
    """T = M x N and how the tables of a group are placed."""

    num_groups: int = 1
    replicas: Replicas = Replicas.intra_host
    # Kinds that may be used. Of row_wise and table_row_wise the first one takes the large tables.
    sharding: list[ShardingKind] = field(default_factory=lambda: [ShardingKind.table_wise, ShardingKind.row_wise])
    # Tables from this size on have their rows split, where that is allowed; so do those that no rank can hold.
    split_rows_above_gb: float = 10.0
    # Place as this file of sparse2d.train plan_only=true says.
    plan_file: str | None = None


@dataclass
class AveragingConfig:
    """How replicas are averaged: as ``sync`` of a training run."""

    interval: int = 1
    rows: SyncRows = SyncRows.all
    moments: SyncMoments = SyncMoments.with_weights

    @property
    def averages_moments(self) -> bool:
        """At once or later: what is sent is the same."""
        return self.moments is not SyncMoments.never


@dataclass
class GridConfig:
    """Layouts of a table: all GPU counts with all numbers of groups, and with all group sizes."""

    num_gpus: list[int] = field(default_factory=list)
    num_groups: list[int] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)
    intervals: list[int] = field(default_factory=lambda: [1])


@dataclass
class SimulateConfig:
    """``python -m sparse2d.simulate``."""

    experiment: str = "adhoc"
    task: Task = Task.point
    results_dir: str = "results"
    # T.
    num_gpus: int = 256
    parallelism: LayoutConfig = field(default_factory=LayoutConfig)
    sync: AveragingConfig = field(default_factory=AveragingConfig)
    # As of a training run: with sparse_dist the next batch's ids travel beside the whole step, with none before it.
    pipeline: Pipeline = Pipeline.sparse_dist
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    constants: ConstantsConfig = field(default_factory=ConstantsConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    # Name of the table that a sweep, recommend or validate_runs (of bytes) writes to results_dir/tables; null = theirs.
    table: str | None = None
    # Folders below which validate_runs looks for records of training runs.
    runs: list[str] = field(default_factory=list)
    # Published points that calibrate and validate fit: full model parallelism at these GPU counts.
    fit_num_gpus: list[int] = field(default_factory=lambda: [256, 512, 1024])


# A placement keeps some numbers for each GPU.
MAX_GPUS = 2**20


def check_simulate(config: SimulateConfig) -> None:
    """Refuse numbers that mean nothing, before anything is computed.

    Raises:
        UserError: one line with the number and what it must be.
    """
    workload, hardware = config.workload, config.hardware
    positive: dict[str, Any] = {
        "num_gpus": config.num_gpus,
        "parallelism.num_groups": config.parallelism.num_groups,
        "sync.interval": config.sync.interval,
        "workload.batch_per_gpu": workload.batch_per_gpu,
        "workload.weight_bytes": workload.weight_bytes,
        "workload.activation_bytes": workload.activation_bytes,
        "workload.wire_bytes": workload.wire_bytes,
    }
    skipped = (
        "name",
        "sources",
        "collectives",
        "congestion_half_hosts",
        "latency_us",
        "slow_host_share",
        "slow_host_excess",
    )
    positive |= {f"hardware.{f.name}": getattr(hardware, f.name) for f in fields(hardware) if f.name not in skipped}
    positive |= {f"hardware.{name}": getattr(hardware, name) for name in ("congestion_half_hosts",)}
    for name in ("num_gpus", "num_groups", "group_sizes", "intervals"):
        positive |= {f"grid.{name}": value for value in getattr(config.grid, name)}
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}={value} must be a finite number above 0")
    for name, count in {"num_gpus": config.num_gpus, "grid.num_gpus": max(config.grid.num_gpus, default=1)}.items():
        if count > MAX_GPUS:
            raise UserError(f"{name}={count} is beyond the {MAX_GPUS} GPUs that the cost model places tables on")
    zero_or_more = {
        "hardware.latency_us": hardware.latency_us,
        "hardware.slow_host_excess": hardware.slow_host_excess,
        "workload.zipf_exponent": workload.zipf_exponent,
        "workload.dense_memory_gb": workload.dense_memory_gb,
        "workload.dense_mparams": workload.dense_mparams,
        "workload.dense_tflop_per_sample": workload.dense_tflop_per_sample,
        "workload.state_bytes_per_row": workload.state_bytes_per_row,
        "parallelism.split_rows_above_gb": config.parallelism.split_rows_above_gb,
    }
    for name, value in zero_or_more.items():
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{name}={value} must be a finite number of at least 0")
    if config.table is not None and Path(config.table).name != config.table:
        raise UserError(f"table={config.table} must be a name, without a folder; results_dir says where it goes")
    if hardware.gpus_per_host % hardware.gpus_per_nic:
        raise UserError(
            f"hardware.gpus_per_nic={hardware.gpus_per_nic} does not divide gpus_per_host={hardware.gpus_per_host}"
        )
    for kind in config.parallelism.sharding:
        if kind not in MODELLED:
            raise UserError(
                f"parallelism.sharding holds {kind.name}, which is not modelled; choose from "
                f"{[modelled.name for modelled in MODELLED]}"
            )
    if ShardingKind.table_wise not in config.parallelism.sharding:
        raise UserError(
            f"parallelism.sharding={[kind.name for kind in config.parallelism.sharding]} lacks table_wise, which takes "
            "the tables that are too small to be split"
        )
    shares = {f"constants.{name}": getattr(config.constants, name) for name in FREE}
    shares |= {
        f"hardware.{name}": getattr(hardware, name)
        for name in ("usable_memory_share", "lookup_efficiency", "host_efficiency", "nic_efficiency", "slow_host_share")
    }
    for name, value in shares.items():
        if not 0 <= value <= 1 or (value == 0 and name.endswith("efficiency")):
            raise UserError(f"{name}={value} must be a share between 0 and 1")
