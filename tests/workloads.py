"""Random workloads and layouts for the cost model's tests."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from sparse2d.config import Pipeline, Replicas, ShardingKind, SyncRows
from sparse2d.cost.config import (
    AveragingConfig,
    Collectives,
    ConstantsConfig,
    HardwareConfig,
    LayoutConfig,
    SimulateConfig,
    TableSource,
    WorkloadConfig,
)

PLACEMENTS = [
    [ShardingKind.table_wise],
    [ShardingKind.table_wise, ShardingKind.row_wise],
    [ShardingKind.table_wise, ShardingKind.column_wise, ShardingKind.row_wise],
    [ShardingKind.table_wise, ShardingKind.column_wise, ShardingKind.table_row_wise],
]


def hardware(**changed: Any) -> HardwareConfig:
    """A cluster of round numbers: hosts of 4 GPUs, nothing lost, no latency."""
    numbers = {
        "memory_gb": 80.0,
        "usable_memory_share": 1.0,
        "memory_gb_per_s": 1000.0,
        "lookup_efficiency": 1.0,
        "peak_tflops": 100.0,
        "gpus_per_host": 4,
        "host_gb_per_s": 100.0,
        "host_efficiency": 1.0,
        "nic_gb_per_s": 10.0,
        "nic_efficiency": 1.0,
        "half_rate_message_kb": 1e-9,
        "latency_us": 0.0,
    }
    return HardwareConfig(name="round", **(numbers | changed))  # type: ignore[arg-type]


def workload(rows: list[int], dims: list[int], pooling: list[float], **changed: float) -> WorkloadConfig:
    """Listed tables; a dense part of 1 GFLOP a sample."""
    options = {"batch_per_gpu": 100, "dense_tflop_per_sample": 1e-3, "dense_mparams": 1.0, "zipf_exponent": 0.0}
    return WorkloadConfig(
        name="listed",
        source=TableSource.listed,
        rows=rows,
        dims=dims,
        pooling=pooling,
        **(options | changed),  # type: ignore[arg-type]
    )


def options(
    tables: WorkloadConfig, num_gpus: int = 4, num_groups: int = 1, machine: HardwareConfig | None = None
) -> SimulateConfig:
    """A layout of full model parallelism or 2D with nothing hidden."""
    return SimulateConfig(
        num_gpus=num_gpus,
        parallelism=LayoutConfig(num_groups=num_groups),
        workload=tables,
        hardware=machine or hardware(),
        constants=ConstantsConfig(dense_efficiency=1.0, alltoall_efficiency=1.0, overlap_share=0.0),
    )


@dataclass(frozen=True)
class Sizes:
    """Of a drawn table."""

    rows: int
    dim: int
    pooling: float


TABLES = st.lists(
    st.builds(
        Sizes,
        rows=st.integers(1, 2_000_000),
        dim=st.sampled_from([4, 32, 64, 128, 256]),
        pooling=st.floats(0.5, 200),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def simulations(draw: st.DrawFn) -> SimulateConfig:
    """Any workload that fits, on any layout."""
    tables = draw(TABLES)
    num_groups = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    gpus_per_host = draw(st.sampled_from([1, 4, 8]))
    return SimulateConfig(
        num_gpus=num_groups * draw(st.sampled_from([1, 2, 3, 4, 8, 12, 32])),
        parallelism=LayoutConfig(
            num_groups=num_groups,
            replicas=draw(st.sampled_from(Replicas)),
            sharding=draw(st.sampled_from(PLACEMENTS)),
            split_rows_above_gb=draw(st.sampled_from([0.0, 0.05, 10.0])),
        ),
        sync=AveragingConfig(interval=draw(st.integers(1, 20)), rows=draw(st.sampled_from(SyncRows))),
        workload=workload(
            [table.rows for table in tables],
            [table.dim for table in tables],
            [table.pooling for table in tables],
            batch_per_gpu=draw(st.integers(1, 5000)),
            zipf_exponent=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])),
            dense_tflop_per_sample=draw(st.floats(0, 1)),
            dense_mparams=draw(st.floats(0, 1000)),
        ),
        hardware=hardware(
            latency_us=draw(st.floats(0, 100)),
            half_rate_message_kb=draw(st.floats(1, 1000)),
            slow_host_share=draw(st.floats(0, 1)),
            slow_host_excess=draw(st.floats(0, 1)),
            gpus_per_host=gpus_per_host,
            gpus_per_nic=draw(st.sampled_from([1, gpus_per_host])),
            collectives=draw(st.sampled_from(Collectives)),
        ),
        pipeline=draw(st.sampled_from([Pipeline.none, Pipeline.sparse_dist])),
        constants=ConstantsConfig(
            dense_efficiency=draw(st.floats(0.05, 0.8)),
            alltoall_efficiency=draw(st.floats(0.2, 1)),
            overlap_share=draw(st.floats(0, 1)),
        ),
    )
