"""Published points beside modelled ones, with constants fitted on full model parallelism only, and their errors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse2d.cost.calibrate import Fit, at, constants_table, fit, fit_points
from sparse2d.cost.config import FREE, ConstantsConfig, SimulateConfig
from sparse2d.cost.model import Prediction, predict
from sparse2d.cost.paper import Published, published
from sparse2d.cost.recorded import bytes_finding, steps_finding
from sparse2d.cost.show import LABEL, WIDTH, text_table
from sparse2d.cost.sweep import Row, fingerprint, read_table, write_table
from sparse2d.cost.workload import Workload, make_workload

TOLERANCE_PCT = 7.0
NAMES = {"full_mp": "full MP", "sparse_2d": "2D"}
COLUMNS = [
    "label",
    "role",
    "case",
    "num_gpus",
    "parallelism",
    "num_groups",
    "published_qps",
    "qps",
    "error_pct",
    "trivial_error_pct",
    "peak_memory_pct",
    "published_oom",
    "oom",
    "fingerprints",
]


@dataclass(frozen=True)
class Case:
    """One set of assumptions: its options, and the groups at 4096 GPUs if they are not the published N = 256."""

    name: str
    config: SimulateConfig
    num_groups_at: dict[int, int]


def cases(config: SimulateConfig) -> Iterator[Case]:
    """What is assumed, then what else it could be: each unknown on its own."""
    yield Case("as assumed", config, {})
    for batch in (512, 2048):
        yield Case(
            f"batch per GPU {batch}", replace(config, workload=replace(config.workload, batch_per_gpu=batch)), {}
        )
    yield Case("N = 512 at 4096 GPUs", config, {4096: 8})
    yield Case("no slow hosts", replace(config, hardware=replace(config.hardware, slow_host_share=0.0)), {})
    yield Case("averaging every 4 steps", replace(config, sync=replace(config.sync, interval=4)), {})
    for seed in (1, 2):
        generated = replace(config.workload.generated, seed=seed)
        yield Case(
            f"tables of seed {seed}", replace(config, workload=replace(config.workload, generated=generated)), {}
        )
    # The third constant must not know of the point that is left out.
    held = replace(config.constants, overlap_share=FREE["overlap_share"].assumed)
    yield Case("constants fitted on 256, 512", replace(config, fit_num_gpus=[256, 512], constants=held), {})


def evaluate(case: Case) -> tuple[Fit, list[Row]]:
    """Fit the constants on full model parallelism, then predict every published point."""
    config = case.config
    workload = make_workload(config.workload)
    fitted = fit(config, workload, fit_points(config))
    points = published(str(config.workload.paper))
    base = min((point for point in points if point.qps), key=lambda point: point.num_gpus)
    return fitted, [_row(case, point, fitted.constants, workload, base) for point in points]


def _row(case: Case, point: Published, constants: ConstantsConfig, workload: Workload, base: Published) -> Row:
    num_groups = point.num_groups if point.num_groups == 1 else case.num_groups_at.get(point.num_gpus, point.num_groups)
    options = at(case.config, point.num_gpus, num_groups, constants)
    prediction: Prediction = predict(options, workload)
    row: dict[str, Any] = {
        "label": LABEL,
        "role": "fit" if point.key in [*constants.fitted_on, *case.config.workload.fitted_on] else "prediction",
        "case": case.name,
        "num_gpus": point.num_gpus,
        "parallelism": point.parallelism,
        "num_groups": num_groups,
        "published_qps": point.qps,
        "qps": None if prediction.oom and point.qps is None else prediction.qps,
        "peak_memory_pct": prediction.peak_memory_pct,
        "published_oom": point.oom,
        "oom": prediction.oom,
        "fingerprints": fingerprint(options),
    }
    if point.qps is not None:
        assert base.qps is not None
        row["error_pct"] = 100 * (prediction.qps / point.qps - 1)
        # The trivial predictor scales the smallest published point perfectly.
        row["trivial_error_pct"] = 100 * (base.qps * point.num_gpus / base.num_gpus / point.qps - 1)
    return row


def validate(config: SimulateConfig) -> None:
    """Print and write the comparison for the assumptions and for each alternative to them."""
    console = Console(width=WIDTH)
    rows: list[Row] = []
    for number, case in enumerate(cases(config)):
        fitted, found = evaluate(case)
        rows += found
        if number == 0:
            console.print(constants_table(fitted))
            console.print(_points_table(found))
    console.print(_cases_table(rows))
    for line in [*findings(rows), *recorded_findings(Path(config.results_dir) / "tables")]:
        console.print(line, highlight=False)
    console.print(f"\nassumptions of {config.workload.name}:", highlight=False)
    for text in config.workload.assumptions:
        console.print(f"  - {text}", highlight=False, markup=False)
    console.print(f"sources of {config.hardware.name}:", highlight=False)
    for text in config.hardware.sources:
        console.print(f"  - {text}", highlight=False, markup=False)
    path = Path(config.results_dir) / "tables" / f"{config.workload.paper}_validation.csv"
    write_table(rows, path, COLUMNS)
    console.print(f"table: {path}", highlight=False)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _points_table(rows: list[Row]) -> Table:
    cells = [
        [
            row["parallelism"],
            str(row["num_gpus"]),
            str(row["num_groups"]),
            row["role"],
            "OOM" if row["published_oom"] else f"{row['published_qps']:.3g}",
            "OOM" if row["oom"] else f"{row['qps']:.3g}",
            _percent(row.get("error_pct")),
            _percent(row.get("trivial_error_pct")),
            f"{row['peak_memory_pct']:.1f}",
        ]
        for row in rows
    ]
    headings = ["parallelism", "T", "M", "role", "paper QPS", "modelled QPS", "error %", "trivial %", "memory %"]
    return text_table("published and modelled", headings, cells, "trivial: perfect scaling of the smallest point")


def _cases_table(rows: list[Row]) -> Table:
    def tested(row: Row) -> bool:
        return row["published_qps"] is not None and (row["num_groups"] > 1 or row["num_gpus"] == 1024)

    points = list(dict.fromkeys((row["parallelism"], row["num_gpus"]) for row in rows if tested(row)))
    cells = []
    for name in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == name]
        errors = {(row["parallelism"], row["num_gpus"]): row["error_pct"] for row in of_case if tested(row)}
        full = {row["num_gpus"]: row for row in of_case if row["parallelism"] == "full_mp"}
        verdicts = [f"{'OOM' if row['oom'] else 'fits'}" for gpus, row in full.items() if gpus >= 1024]
        cells.append([name, *(_percent(errors[point]) for point in points), " ".join(verdicts)])
    headings = ["assumption changed", *(f"{NAMES[kind]} {gpus}" for kind, gpus in points), "full MP 1024.."]
    return text_table("error of QPS in %, constants fitted anew for each line", headings, cells)


def findings(rows: list[Row]) -> list[str]:
    """What the comparison says about the 2D points, in words."""
    two_d = [row for row in rows if row["num_groups"] > 1 and row["published_qps"] is not None]
    assumed = [row for row in two_d if row["case"] == two_d[0]["case"]]
    worst = max(abs(row["error_pct"]) for row in assumed)
    spread = max(abs(row["error_pct"]) for row in two_d)
    beaten = [row["num_gpus"] for row in assumed if abs(row["error_pct"]) < abs(row["trivial_error_pct"])]
    return [
        f"2D as assumed: largest error {worst:.1f} % ({'within' if worst <= TOLERANCE_PCT else 'NOT within'} "
        f"{TOLERANCE_PCT:g} %); nearer than perfect scaling at {beaten} GPUs",
        f"over all assumptions tried: largest error {spread:.1f} %",
    ]


def recorded_findings(tables: Path) -> list[str]:
    """What ``validate_runs`` found of recorded runs, from its tables."""
    found = []
    for name, finding in (("byte_validation", bytes_finding), ("shaped_validation", steps_finding)):
        path = tables / f"{name}.csv"
        if path.is_file():
            found.append(f"{finding(read_table(path))}: {path}")
        else:
            found.append(f"no {path}: validate_runs makes it from recorded runs")
    return found
