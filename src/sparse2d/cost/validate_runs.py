"""What the model says of recorded runs beside what they measured: bytes on the wire, and step times on shaped links."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sparse2d.cost.config import SimulateConfig
from sparse2d.cost.recorded import bytes_finding, steps_finding
from sparse2d.cost.runs import Run, find_runs
from sparse2d.cost.shaped import (
    COLUMNS,
    Repeated,
    fits,
    repeated,
    step_rows,
    steps_table,
)
from sparse2d.cost.show import WIDTH, text_table
from sparse2d.cost.sweep import Row, write_table
from sparse2d.cost.workload import Floats
from sparse2d.errors import UserError

AXES = [
    "label",
    "experiment",
    "num_ranks",
    "parallelism",
    "num_groups",
    "replicas",
    "sharding",
    "sync_rows",
    "sync_interval",
    "batch_per_rank",
    "embedding_dim",
]
# Kinds of traffic: the record's key, and the name in tables.
TRAFFIC = {
    "lookup_bytes_per_step": "lookup_bytes",
    "sync_bytes_per_sync": "sync_bytes",
    "dense_bytes_per_step": "dense_bytes",
}
BYTES_COLUMNS = [
    *AXES,
    *(f"{name}{part}" for name in TRAFFIC.values() for part in ("", "_modelled", "_error_pct", "_max_error_pct")),
    "n_seeds",
    "fingerprints",
]


def validate_runs(config: SimulateConfig) -> None:
    """Print and write the comparison with the runs below ``config.runs``.

    Raises:
        UserError: if there is no run that can be compared.
    """
    if not config.runs:
        raise UserError("runs is empty: name folders of runs, as in runs=[results/runs/byte_validation]")
    runs = find_runs(config.runs)
    console = Console(width=WIDTH)
    rows = sorted((bytes_row(run, config) for run in runs), key=_order)
    console.print(_bytes_table(rows))
    console.print(bytes_finding(rows), highlight=False)
    tables = Path(config.results_dir) / "tables"
    path = tables / f"{config.table or 'byte_validation'}.csv"
    write_table(rows, path, BYTES_COLUMNS)
    console.print(f"table: {path}", highlight=False)
    if layouts := repeated(runs):
        _validate_steps(layouts, config, console, tables / "shaped_validation.csv")


def _validate_steps(layouts: list[Repeated], config: SimulateConfig, console: Console, path: Path) -> None:
    found = step_rows(layouts, fits(layouts, config))
    rows = [axes_of(layout.run) | row for layout, row in zip(layouts, found, strict=True)]
    rows.sort(key=_order)
    console.print(steps_table(rows))
    console.print(steps_finding(rows), highlight=False)
    write_table(rows, path, [*AXES, *COLUMNS])
    console.print(f"table: {path}", highlight=False)


def _order(row: Row) -> tuple[str, ...]:
    names = ("experiment", "num_ranks", "num_groups", "sharding", "replicas", "sync_rows", "sync_interval")
    return tuple(str(row[name]) for name in names)


def axes_of(run: Run) -> Row:
    """What tells runs apart."""
    trained = run.config
    layout = trained.parallelism
    return {
        "label": run.record["provenance"],
        "experiment": trained.experiment,
        "num_ranks": run.num_ranks,
        "parallelism": layout.kind.name,
        "num_groups": layout.num_groups,
        "replicas": layout.replicas.name,
        "sharding": "+".join(kind.name for kind in layout.sharding),
        "sync_rows": trained.sync.rows.name if layout.num_groups > 1 else None,
        "sync_interval": trained.sync.interval if layout.num_groups > 1 else None,
        "batch_per_rank": run.batch_per_rank,
        "embedding_dim": trained.model.embedding_dim,
        "n_seeds": 1,
        "fingerprints": run.record["fingerprint"],
    }


def bytes_row(run: Run, config: SimulateConfig) -> Row:
    """Bytes that a rank sends: measured (mean over the ranks), modelled, and the errors of mean and maximum."""
    sent = run.predicted(config).sent
    modelled: dict[str, Floats] = {
        "lookup_bytes": sent.lookup,
        "sync_bytes": sent.averaging,
        "dense_bytes": np.array([sent.dense]),
    }
    row = axes_of(run)
    for key, name in TRAFFIC.items():
        measured: dict[str, float] = run.record["comms"][key]
        of_ranks = modelled[name]
        row |= {
            name: measured["mean"],
            f"{name}_modelled": float(of_ranks.mean()),
            f"{name}_error_pct": _error_pct(float(of_ranks.mean()), measured["mean"]),
            f"{name}_max_error_pct": _error_pct(float(of_ranks.max()), measured["max"]),
        }
    return row


def _error_pct(modelled: float, measured: float) -> float | None:
    """None where neither sends anything."""
    if measured == 0:
        return None if modelled == 0 else float("inf")
    return 100 * (modelled / measured - 1)


def _bytes_table(rows: Sequence[Row]) -> Table:
    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        [
            row["label"],
            str(row["num_ranks"]),
            str(row["num_groups"]),
            _short(row["sharding"]),
            shown(row["sync_rows"], ""),
            shown(row["sync_interval"], "d"),
            *(
                cell
                for name in TRAFFIC.values()
                for cell in (shown(row[name] / 1e3, ".1f"), shown(row[f"{name}_error_pct"], "+.2f"))
            ),
        ]
        for row in rows
    ]
    headings = [
        "label",
        "T",
        "M",
        "sharding",
        "rows",
        "K",
        "lookup kB",
        "err %",
        "sync kB",
        "err %",
        "dense kB",
        "err %",
    ]
    caption = "measured bytes that a rank sends in a step (sync: an averaging), and the model's error"
    return text_table("bytes on the wire", headings, cells, caption)


def _short(sharding: str) -> str:
    """Initials of the kinds: ``TW RW``."""
    return " ".join("".join(word[0] for word in kind.split("_")).upper() for kind in sharding.split("+"))
