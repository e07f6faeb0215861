"""Which M, K and placement for a workload on a cluster, how flat the optimum is, what binds, and what it hangs on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse2d.config import ShardingKind, SyncRows
from sparse2d.cost.config import FREE, SimulateConfig
from sparse2d.cost.model import GB, Prediction, predict
from sparse2d.cost.placement import DoesNotFitError
from sparse2d.cost.show import LABEL, WIDTH, text_table, verdict
from sparse2d.cost.sweep import COLUMNS, Row, layout_row, write_table
from sparse2d.cost.workload import Workload, make_workload
from sparse2d.errors import UserError

TW, CW, RW, TWRW = (
    ShardingKind.table_wise,
    ShardingKind.column_wise,
    ShardingKind.row_wise,
    ShardingKind.table_row_wise,
)
PLACEMENTS = {
    "table, row": [TW, RW],
    "table, column, row": [TW, CW, RW],
    "table, column, row inside hosts": [TW, CW, TWRW],
}
# M within so much of the best QPS count as equally good: less than the model can tell.
FLAT_PCT = 2.0
# Inputs of the tornado are changed by this factor up and down.
CHANGE = 1.25
TORNADO_COLUMNS = ["label", "input", "low", "high", "qps_low", "qps_high", "num_groups_low", "num_groups_high"]


@dataclass(frozen=True)
class Choice:
    """A layout and its prediction."""

    placement: str
    config: SimulateConfig
    prediction: Prediction

    @property
    def num_groups(self) -> int:
        """M."""
        return self.config.parallelism.num_groups

    @property
    def qps(self) -> float:
        """Zero for what does not fit."""
        return 0.0 if self.prediction.oom else self.prediction.qps


def divisors(number: int) -> list[int]:
    """All M that divide T."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def choices(config: SimulateConfig, workload: Workload, placements: dict[str, list[ShardingKind]]) -> Iterator[Choice]:
    """Every M with every placement, at the options' K; groups too small for the tables are left out."""
    for name, kinds in placements.items():
        for num_groups in divisors(config.num_gpus):
            layout = replace(config.parallelism, num_groups=num_groups, sharding=kinds)
            candidate = replace(config, parallelism=layout)
            try:
                yield Choice(name, candidate, predict(candidate, workload))
            except DoesNotFitError:
                continue


def best(config: SimulateConfig, workload: Workload, placements: dict[str, list[ShardingKind]]) -> Choice | None:
    """The choice of the highest QPS that fits; None if none does."""
    found = [choice for choice in choices(config, workload, placements) if choice.qps]
    return max(found, key=lambda choice: choice.qps, default=None)


def recommend(config: SimulateConfig) -> None:
    """Print the recommendation and what it rests on, and write both tables.

    Raises:
        UserError: if no layout fits.
    """
    workload = make_workload(config.workload)
    winner = best(config, workload, PLACEMENTS)
    if winner is None:
        state = workload.rows.sum() * workload.state_bytes_per_row
        raise UserError(
            f"no layout of {config.num_gpus} x {config.hardware.name} fits {workload.name}: tables and optimizer state "
            f"{(workload.table_bytes.sum() + state) / GB:.1f} GB, dense part {workload.dense_memory / GB:g} GB on each "
            f"GPU of {config.hardware.memory_gb:g} GB; use more GPUs or a smaller batch"
        )
    of_placement = {winner.placement: PLACEMENTS[winner.placement]}
    console = Console(width=WIDTH)
    rows = _grid_rows(config, workload)
    console.print(_grid_table(config, rows))
    for line in reasons(winner, workload, list(choices(config, workload, of_placement)), rows):
        console.print(line, highlight=False, markup=False)
    bars = tornado(winner.config, workload, of_placement)
    console.print(_tornado_table(bars))
    tables = Path(config.results_dir) / "tables"
    name = config.table or f"recommend_{workload.name}"
    write_table(rows, tables / f"{name}.csv", ["placement", *COLUMNS])
    write_table(bars, tables / f"{name}_tornado.csv", TORNADO_COLUMNS)
    console.print(f"tables: {tables / name}.csv, {name}_tornado.csv", highlight=False)


def reasons(winner: Choice, workload: Workload, same_placement: list[Choice], grid: list[Row]) -> list[str]:
    """Best M, its sharding group, the flatness of the optimum, what K is worth, and what binds, in words."""
    config, prediction = winner.config, winner.prediction
    mesh, hosts = prediction.mesh, prediction.mesh.group_size / config.hardware.gpus_per_host
    flat = [c.num_groups for c in same_placement if c.qps >= winner.qps * (1 - FLAT_PCT / 100)]
    full = next((c for c in same_placement if c.num_groups == 1), None)
    gain = "full MP does not fit" if full is None or not full.qps else f"{winner.qps / full.qps:.2f} x full MP"
    return [
        f"{LABEL}: best M = {mesh.num_groups} at K = {config.sync.interval}, placement {winner.placement}: "
        f"{winner.qps:.4g} QPS, {gain}",
        f"{LABEL}: sharding group N = {mesh.group_size} GPUs ({hosts:g} hosts), {verdict(prediction)}",
        f"{LABEL}: flat within {FLAT_PCT:g} % for M in {flat}",
        f"{LABEL}: {_next_group(winner, same_placement)}",
        f"{LABEL}: {_other_intervals(winner, grid)}",
        *(f"{LABEL}: {line}" for line in binding(winner, workload)),
        *(f"{LABEL}: {line}" for line in _touched(winner, workload)),
    ]


def _next_group(winner: Choice, same_placement: list[Choice]) -> str:
    """Why not more groups."""
    later = [choice for choice in same_placement if choice.num_groups > winner.num_groups]
    more = [m for m in divisors(winner.config.num_gpus) if m > winner.num_groups]
    if not more:
        return "M = T: every GPU holds all tables"
    if not later or later[0].num_groups != more[0]:
        return f"memory bounds M: with M = {more[0]} a group cannot hold the tables"
    if later[0].prediction.oom:
        return f"memory bounds M: M = {more[0]} needs {later[0].prediction.peak_memory_pct:.0f} % of a GPU's memory"
    loss = 100 * (1 - later[0].qps / winner.qps)
    step, next_step = winner.prediction.step, later[0].prediction.step
    return (
        f"averaging bounds M: M = {more[0]} loses {loss:.1f} % (averaging {1e3 * step.averaging:.1f} -> "
        f"{1e3 * next_step.averaging:.1f} ms a step)"
    )


def _other_intervals(winner: Choice, grid: list[Row]) -> str:
    """Why K stays, and what QPS the other intervals of the grid would give."""
    own = winner.config.sync.interval
    best_of: dict[int, Row] = {}
    for row in sorted((row for row in grid if row["qps"] and not row["oom"]), key=lambda row: row["qps"]):
        best_of[row["sync_interval"]] = row
    others = ", ".join(
        f"K = {interval}: {row['qps'] / winner.qps:.2f} x that with M = {row['num_groups']}"
        for interval, row in sorted(best_of.items())
        if interval != own
    )
    kept = f"K = {own} is sync.interval: what NE another K gives, the model cannot say"
    return f"{kept}; {others}" if others else kept


def binding(winner: Choice, workload: Workload) -> list[str]:
    """QPS gained by 25 % more of each resource, and by perfect balance, the largest first."""
    config = winner.config
    gains = {}
    for name in ("nic_gb_per_s", "host_gb_per_s", "memory_gb_per_s", "peak_tflops"):
        hardware = replace(config.hardware, **{name: getattr(config.hardware, name) * CHANGE})
        gains[f"25 % more {name}"] = predict(replace(config, hardware=hardware), workload).qps
    gains["perfect balance"] = predict(config, workload, balanced=True).qps
    ordered = sorted(gains.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * (qps / winner.qps - 1):+.1f} %" for name, qps in ordered)
    return [f"what binds, as QPS gained: {shares}"]


def _touched(winner: Choice, workload: Workload) -> list[str]:
    """What averaging touched rows instead of all would change."""
    if winner.config.sync.rows is not SyncRows.all:
        return []
    config = replace(winner.config, sync=replace(winner.config.sync, rows=SyncRows.auto))
    found = best(config, workload, PLACEMENTS)
    if found is None:
        return []
    return [f"with sync.rows=auto: best M = {found.num_groups}, {found.qps / winner.qps:.2f} x that"]


def tornado(config: SimulateConfig, workload: Workload, placements: dict[str, list[ShardingKind]]) -> list[Row]:
    """Best M and its QPS with each input lower and higher, the most influential first."""
    rows: list[Row] = []
    for name, change, low, high in _inputs(config, workload):
        ends = [best(*change(value), placements) for value in (low, high)]
        qps = [end.qps if end else None for end in ends]
        groups = [end.num_groups if end else None for end in ends]
        rows.append(dict(zip(TORNADO_COLUMNS, [LABEL, name, low, high, *qps, *groups], strict=True)))
    return sorted(rows, key=lambda row: -abs((row["qps_high"] or 0) - (row["qps_low"] or 0)))


Change = Callable[[float], tuple[SimulateConfig, Workload]]


def _inputs(config: SimulateConfig, workload: Workload) -> Iterator[tuple[str, Change, float, float]]:
    """Name, how to change it, and its two ends; constants go to the ends of their plausible ranges."""

    def of(part: str, name: str) -> Change:
        def change(value: float) -> tuple[SimulateConfig, Workload]:
            changed: Any = replace(getattr(config, part), **{name: value})
            return replace(config, **{part: changed}), workload

        return change

    def of_workload(name: str) -> Change:
        return lambda value: (config, replace(workload, **{name: type(getattr(workload, name))(value)}))

    for name in ("nic_gb_per_s", "host_gb_per_s", "memory_gb_per_s", "memory_gb"):
        value = getattr(config.hardware, name)
        yield name, of("hardware", name), value / CHANGE, value * CHANGE
    for name, free in FREE.items():
        yield name, of("constants", name), free.low, free.high
    for name in ("batch_per_gpu", "dense_flops"):
        value = getattr(workload, name)
        yield name, of_workload(name), value / CHANGE, value * CHANGE
    yield "pooling (factor)", lambda f: (config, replace(workload, pooling=workload.pooling * f)), 1 / CHANGE, CHANGE
    yield "rows (factor)", lambda f: (config, replace(workload, rows=workload.rows * f)), 1 / CHANGE, CHANGE
    yield "slow_host_share", of("hardware", "slow_host_share"), 0.0, 0.01


def _grid_rows(config: SimulateConfig, workload: Workload) -> list[Row]:
    rows = []
    for name, kinds in PLACEMENTS.items():
        for interval in config.grid.intervals:
            for num_groups in divisors(config.num_gpus):
                layout = replace(config.parallelism, num_groups=num_groups, sharding=kinds)
                options = replace(config, parallelism=layout, sync=replace(config.sync, interval=interval))
                row = {"placement": name} | layout_row(options, workload, quiet=True)
                # What was fitted, was fitted with the options' own placement.
                rows.append(row if kinds == config.parallelism.sharding else row | {"role": "prediction"})
    return rows


def _grid_table(config: SimulateConfig, rows: list[Row]) -> Table:
    """QPS by M, one column for each placement and K; what no layout can hold is left out."""
    columns = list(dict.fromkeys((row["placement"], row["sync_interval"]) for row in rows))
    cells = []
    for num_groups in dict.fromkeys(row["num_groups"] for row in rows):
        of_m = {(r["placement"], r["sync_interval"]): r for r in rows if r["num_groups"] == num_groups}
        if any(row["qps"] for row in of_m.values()):
            shown = ["OOM" if of_m[key]["oom"] else f"{of_m[key]['qps']:.3g}" for key in columns]
            memory = min((r["peak_memory_pct"] for r in of_m.values() if r["peak_memory_pct"]), default=None)
            cells.append([str(num_groups), "-" if memory is None else f"{memory:.0f}", *shown])
    headings = ["M", "mem %", *(f"{SHORT[name]} K={interval}" for name, interval in columns)]
    title = f"QPS ({LABEL}): {config.workload.name} on {config.num_gpus} x {config.hardware.name}"
    caption = "T table-wise, C column-wise, R row-wise, H rows inside a host; mem: the least of the placements"
    return text_table(title, headings, cells, caption)


SHORT = {"table, row": "TR", "table, column, row": "TCR", "table, column, row inside hosts": "TCH"}


def _tornado_table(bars: list[Row]) -> Table:
    def end(row: Row, side: str) -> list[str]:
        if row[f"qps_{side}"] is None:
            return ["nothing fits", "-"]
        return [f"{row[f'qps_{side}']:.4g}", str(row[f"num_groups_{side}"])]

    cells = [
        [row["input"], f"{row['low']:.4g}", *end(row, "low"), f"{row['high']:.4g}", *end(row, "high")] for row in bars
    ]
    headings = ["input", "low", "QPS", "best M", "high", "QPS", "best M"]
    return text_table(f"what the recommendation hangs on ({LABEL})", headings, cells)
