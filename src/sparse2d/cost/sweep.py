"""Tables of many layouts, with the published rows beside the modelled ones, as ``results/tables/<table>.csv``."""

import csv
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sparse2d.cost.config import SimulateConfig
from sparse2d.cost.model import Prediction, predict
from sparse2d.cost.paper import Published, point_key, published
from sparse2d.cost.placement import DoesNotFitError
from sparse2d.cost.show import LABEL, WIDTH, text_table
from sparse2d.cost.workload import Workload, make_workload
from sparse2d.errors import UserError
from sparse2d.records import plain, write_atomically

log = logging.getLogger("sparse2d.simulate")
Row = dict[str, Any]
COLUMNS = [
    "label",
    "role",
    "model",
    "hardware",
    "num_gpus",
    "parallelism",
    "num_groups",
    "group_size",
    "replicas",
    "sync_interval",
    "sync_rows",
    "batch_per_gpu",
    "qps",
    "qps_std",
    "scaling_factor_pct",
    "peak_memory_pct",
    "imbalance",
    "imbalance_bytes",
    "imbalance_time",
    "oom",
    "step_ms",
    "input_dist_ms",
    "lookup_ms",
    "output_dist_ms",
    "dense_ms",
    "gradient_dist_ms",
    "update_ms",
    "dense_all_reduce_ms",
    "averaging_ms",
    "hidden_ms",
    "all_to_all_ms",
    "weights_gb",
    "optimizer_state_gb",
    "activations_gb",
    "n_seeds",
    "fingerprints",
]


def sweep(config: SimulateConfig) -> None:
    """Predict every layout of the grid, print the table and write it.

    Raises:
        UserError: if no layout of the grid is possible, or the table has no name.
    """
    rows = sweep_rows(config)
    if not any(row["label"] == LABEL for row in rows):
        grid = config.grid
        raise UserError(
            f"the grid holds no layout: num_gpus={grid.num_gpus}, num_groups={grid.num_groups}, "
            f"group_sizes={grid.group_sizes}; M must divide T"
        )
    name = config.table or config.experiment
    path = Path(config.results_dir) / "tables" / f"{name}.csv"
    write_table(rows, path, COLUMNS)
    show(rows, f"{name} ({path})")


def sweep_rows(config: SimulateConfig) -> list[Row]:
    """One row for each layout of the grid, then the published ones."""
    workload = make_workload(config.workload)
    rows = [layout_row(point, workload) for point in grid_points(config)]
    gpus = {row["num_gpus"] for row in rows}
    if config.workload.paper is not None:
        rows += [_published_row(point) for point in published(config.workload.paper) if point.num_gpus in gpus]
    _add_scaling(rows)
    order = {"full_mp": 0, "sparse_2d": 1}
    return sorted(
        rows,
        key=lambda row: (order[row["parallelism"]], row["num_gpus"], row["num_groups"], row["sync_interval"] or 0),
    )


def grid_points(config: SimulateConfig) -> Iterator[SimulateConfig]:
    """The options of each layout: every T with every M that divides it, and with every N."""
    grid = config.grid
    for num_gpus in grid.num_gpus or [config.num_gpus]:
        groups = [m for m in grid.num_groups if num_gpus % m == 0]
        groups += [num_gpus // n for n in grid.group_sizes if num_gpus % n == 0]
        for num_groups in dict.fromkeys(groups):
            for interval in grid.intervals if num_groups > 1 else grid.intervals[:1]:
                yield replace(
                    config,
                    num_gpus=num_gpus,
                    parallelism=replace(config.parallelism, num_groups=num_groups),
                    sync=replace(config.sync, interval=interval),
                )


def layout_row(config: SimulateConfig, workload: Workload, quiet: bool = False) -> Row:
    """The table's row of one layout; one whose tables do not fit a group has no times (said unless ``quiet``)."""
    layout = config.parallelism
    key = point_key(config.workload.paper, config.num_gpus, layout.num_groups)
    fitted_on = [*config.constants.fitted_on, *config.workload.fitted_on]
    row: Row = dict.fromkeys(COLUMNS) | {
        "label": LABEL,
        "role": "fit" if key in fitted_on else "prediction",
        "model": workload.name,
        "hardware": config.hardware.name,
        "num_gpus": config.num_gpus,
        "parallelism": "full_mp" if layout.num_groups == 1 else "sparse_2d",
        "num_groups": layout.num_groups,
        "group_size": config.num_gpus // layout.num_groups,
        "replicas": layout.replicas.name,
        "sync_interval": config.sync.interval,
        "sync_rows": config.sync.rows.name,
        "batch_per_gpu": workload.batch_per_gpu,
        "n_seeds": 1,
        "fingerprints": fingerprint(config),
    }
    try:
        return row | _figures(predict(config, workload))
    except DoesNotFitError as error:
        if not quiet:
            log.info("T = %d, M = %d: %s", config.num_gpus, layout.num_groups, error)
        return row | {"oom": True}


def fingerprint(config: SimulateConfig) -> str:
    """16 hex digits over all options that decide the prediction."""
    content = plain(config)
    for name in ("experiment", "task", "results_dir", "grid", "table", "runs", "fit_num_gpus"):
        del content[name]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _figures(prediction: Prediction) -> Row:
    memory = prediction.memory
    figures: Row = {
        "peak_memory_pct": prediction.peak_memory_pct,
        "imbalance": prediction.imbalance["lookups"],
        "imbalance_bytes": prediction.imbalance["bytes"],
        "imbalance_time": prediction.imbalance["time"],
        "all_to_all_ms": 1e3 * prediction.exchange,
        "oom": prediction.oom,
        "step_ms": 1e3 * prediction.step.total,
        "hidden_ms": 1e3 * prediction.hidden,
        "weights_gb": memory.weights / 1e9,
        "optimizer_state_gb": memory.optimizer_state / 1e9,
        "activations_gb": (memory.id_buffers + memory.pooled_buffers) / 1e9,
    }
    figures |= {f"{phase}_ms": 1e3 * value for phase, value in asdict(prediction.step).items()}
    # What does not fit does not run.
    return figures | {"qps": None if prediction.oom else prediction.qps}


def _published_row(point: Published) -> Row:
    values = {name: value for name, value in asdict(point).items() if name in COLUMNS}
    return (
        dict.fromkeys(COLUMNS)
        | values
        | {
            "label": "paper",
            "role": "published",
            "group_size": point.num_gpus // point.num_groups,
            "fingerprints": point.source,
        }
    )


def _add_scaling(rows: Sequence[Row]) -> None:
    """QPS per GPU over that of full model parallelism (or fewest groups) on the fewest GPUs, in percent."""
    modelled = [row for row in rows if row["label"] == LABEL and row["qps"]]
    if not modelled:
        return
    first = min(modelled, key=lambda row: (row["num_gpus"], row["num_groups"], row["sync_interval"]))
    for row in modelled:
        row["scaling_factor_pct"] = 100 * (row["qps"] / row["num_gpus"]) / (first["qps"] / first["num_gpus"])


def write_table(rows: Sequence[Row], path: Path, columns: Sequence[str]) -> None:
    """Write rows as CSV; the file is whole or absent.

    Raises:
        UserError: if it cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _shortened(row.get(name)) for name in columns} for row in rows)
    try:
        write_atomically(path, text.getvalue())
    except OSError as error:
        raise UserError(f"{path}: the table cannot be written: {error.strerror or error}") from error


def read_table(path: Path) -> list[Row]:
    """Rows as ``write_table`` wrote them: numbers as floats, empty cells as None."""

    def value(text: str) -> Any:
        try:
            return float(text) if text else None
        except ValueError:
            return text

    with path.open(newline="") as file:
        return [{name: value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _shortened(value: Any) -> Any:
    return format(value, ".6g") if isinstance(value, float) else value


SHOWN = {
    "label": ("label", ""),
    "role": ("role", ""),
    "num_gpus": ("T", "d"),
    "parallelism": ("layout", ""),
    "num_groups": ("M", "d"),
    "sync_interval": ("K", "d"),
    "qps": ("QPS", ".3g"),
    "scaling_factor_pct": ("scale %", ".1f"),
    "step_ms": ("step ms", ".1f"),
    "all_to_all_ms": ("a2a ms", ".1f"),
    "peak_memory_pct": ("mem %", ".1f"),
    "imbalance": ("imbal.", ".2f"),
}


def show(rows: Sequence[Row], title: str) -> None:
    """Print what a reader compares."""
    cells = [
        [
            *("-" if row[name] is None else format(row[name], form) for name, (_, form) in SHOWN.items()),
            "OOM" if row["oom"] else "yes",
        ]
        for row in rows
    ]
    Console(width=WIDTH).print(text_table(title, [*(heading for heading, _ in SHOWN.values()), "fits"], cells))
