"""A workload: the tables as arrays, and what a sample costs."""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sparse2d.cost.config import GeneratedTables, TableSource, WorkloadConfig
from sparse2d.errors import UserError

Floats = NDArray[np.float64]
LENGTH_BYTES = 4


@dataclass(frozen=True, eq=False)
class Workload:
    """Tables [num_tables] and the dense part; bytes and FLOPs are of one sample unless said otherwise."""

    name: str
    table_names: list[str]
    rows: Floats
    dims: Floats
    pooling: Floats
    zipf: Floats
    batch_per_gpu: int
    dense_flops: float
    dense_params: float
    dense_memory: float
    weight_bytes: int
    activation_bytes: int
    wire_bytes: int
    dense_wire_bytes: int
    id_bytes: int
    state_bytes_per_row: int
    state_bytes_per_value: int

    @cached_property
    def table_bytes(self) -> Floats:
        """Weights of each table."""
        sizes: Floats = self.rows * self.dims * self.weight_bytes
        return sizes

    def state_bytes(self, columns: Floats) -> Floats:
        """Optimizer state of a row of shards that are so many columns wide."""
        return self.state_bytes_per_row + columns * self.state_bytes_per_value

    @cached_property
    def digest(self) -> str:
        """Of all content: equal workloads have equal placements."""
        parts = [np.asarray(getattr(self, field.name)).astype(str).tolist() for field in fields(self)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def hottest_share(self) -> Floats:
        """Share of a table's ids that are its most frequent id, under Zipf's law."""
        shares: Floats = 1 / harmonic(self.rows, self.zipf)
        return shares


def harmonic(rows: Floats, exponent: Floats) -> Floats:
    """Sum of k ** -exponent over k = 1..rows, for each table (midpoint integral beyond the first 32 terms)."""
    first = np.arange(1, 33)[:, None]
    head = np.where(first <= rows, first**-exponent, 0).sum(0)
    low, high = 32.5, np.maximum(rows + 0.5, 32.5)
    with np.errstate(divide="ignore", invalid="ignore"):
        power = 1 - exponent
        tail = np.where(np.abs(power) < 1e-9, np.log(high / low), (high**power - low**power) / power)
    total: Floats = head + tail
    return total


def make_workload(config: WorkloadConfig) -> Workload:
    """Tables and dense part as the options say.

    Raises:
        UserError: one line with the table, the number and what it must be.
    """
    dense_flops, dense_params = config.dense_tflop_per_sample, config.dense_mparams
    names: list[str] = []
    zipf: list[float] = [config.zipf_exponent]
    state = config.state_bytes_per_row, config.state_bytes_per_value
    if config.source is TableSource.listed:
        rows, dims, pooling = config.rows, config.dims, config.pooling
    elif config.source is TableSource.generated:
        rows, dims, pooling = generate(config.generated, config.weight_bytes)
    elif config.source is TableSource.csv:
        # Only who gives a file pays for what checks it.
        from sparse2d.cost.table_file import read_tables

        names, rows, dims, pooling, zipf = read_tables(config)
    else:
        # Composes a training config.
        from sparse2d.cost.from_model import model_workload

        model = model_workload(config.train)
        names, rows, dims, pooling = model.names, model.rows, model.dims, model.pooling
        dense_flops = model.flops_per_sample / 1e12 if dense_flops is None else dense_flops
        dense_params = model.dense_params / 1e6 if dense_params is None else dense_params
        state = model.state_bytes_per_row, model.state_bytes_per_value
    if dense_flops is None or dense_params is None:
        missing = "dense_tflop_per_sample" if dense_flops is None else "dense_mparams"
        raise UserError(f"option workload.{missing} needs a value unless workload.source=model")
    num_tables = len(rows)
    workload = Workload(
        name=config.name,
        table_names=names or [f"table_{index}" for index in range(num_tables)],
        rows=_per_table("rows", rows, num_tables),
        dims=_per_table("dims", dims, num_tables),
        pooling=_per_table("pooling", pooling, num_tables),
        zipf=_per_table("zipf_exponent", zipf, num_tables, lowest=0),
        batch_per_gpu=config.batch_per_gpu,
        dense_flops=dense_flops * 1e12,
        dense_params=dense_params * 1e6,
        dense_memory=config.dense_memory_gb * 1e9,
        weight_bytes=config.weight_bytes,
        activation_bytes=config.activation_bytes,
        wire_bytes=config.wire_bytes,
        dense_wire_bytes=config.dense_wire_bytes,
        id_bytes=config.id_bytes,
        state_bytes_per_row=state[0],
        state_bytes_per_value=state[1],
    )
    if num_tables == 0:
        raise UserError(f"workload {config.name} has no tables; give workload.rows, or another workload.source")
    return workload


def _per_table(name: str, values: list[float] | list[int], num_tables: int, lowest: float = 1e-9) -> Floats:
    if len(values) not in (1, num_tables):
        raise UserError(f"workload.{name} has {len(values)} entries for {num_tables} tables; give 1 or {num_tables}")
    array = np.broadcast_to(np.asarray(values, np.float64), num_tables).copy()
    if bad := [value for value in array if not lowest <= value < np.inf]:
        what = "at least 0" if lowest == 0 else "above 0"
        raise UserError(f"workload.{name} holds {bad[0]:g}; each must be a finite number {what}")
    return array


# Tables of a generated workload: placing more would take minutes.
MAX_TABLES = 100_000


def _check_generated(config: GeneratedTables) -> None:
    checks = {
        "seed": (config.seed >= 0, "at least 0"),
        "num_tables": (1 <= config.num_tables <= MAX_TABLES, f"1 to {MAX_TABLES}"),
        "total_gb": (0 < config.total_gb <= 1e9, "above 0, and at most 1e9"),
        "size_exponent": (0 <= config.size_exponent <= 10, "0 to 10"),
        "dims": (bool(config.dims) and min(config.dims) >= 1, "one or more, each at least 1"),
        "dim_shares": (
            len(config.dims) == len(config.dim_shares)
            and min(config.dim_shares) >= 0
            and abs(sum(config.dim_shares) - 1) <= 1e-6,
            f"a share for each of dims={config.dims}, adding up to 1",
        ),
        "pooling_median": (0 < config.pooling_median < np.inf, "a finite number above 0"),
        "pooling_sigma": (0 <= config.pooling_sigma <= 10, "0 to 10"),
        "pooling_max": (1 <= config.pooling_max < np.inf, "a finite number of at least 1"),
    }
    for name, (holds, expected) in checks.items():
        if not holds:
            raise UserError(f"workload.generated.{name}={getattr(config, name)} must be {expected}")


def generate(config: GeneratedTables, weight_bytes: int) -> tuple[list[int], list[int], list[float]]:
    """Rows, dims and pooling of tables drawn from a seed, in random order.

    Raises:
        UserError: if an option is out of its range, or the shares of the dims are not one for each, adding up to 1.
    """
    _check_generated(config)
    random = np.random.default_rng(config.seed)
    rank = np.arange(1, config.num_tables + 1)
    sizes = rank**-config.size_exponent
    sizes = sizes / sizes.sum() * config.total_gb * 1e9
    dims = np.asarray(config.dims)[np.searchsorted(np.cumsum(config.dim_shares), (rank - 0.5) / config.num_tables)]
    rows = np.maximum(1, np.round(sizes / dims / weight_bytes))
    drawn = random.lognormal(np.log(config.pooling_median), config.pooling_sigma, config.num_tables)
    pooling = np.clip(np.round(drawn), 1, config.pooling_max)
    order = random.permutation(config.num_tables)
    return rows[order].astype(int).tolist(), dims[order].tolist(), pooling.tolist()
