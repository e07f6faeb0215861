"""Step times on shaped links beside the model's: one constant is fitted on full model parallelism, the rest follows."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev

import numpy as np
from rich.table import Table

from sparse2d.cost.config import SimulateConfig
from sparse2d.cost.runs import Run
from sparse2d.cost.show import text_table
from sparse2d.cost.sweep import Row
from sparse2d.records import plain

# Options that do not change what a step takes.
FREE = ("seed", "results_dir", "rerun", "experiment", "tracking", "checkpoint")
PHASES = ("input_dist", "lookup", "output_dist", "dense", "gradient_dist", "update", "dense_all_reduce", "averaging")
COLUMNS = [
    "hosts",
    "ranks_per_host",
    "inter_host_mbit",
    "role",
    "step_ms",
    "step_ms_std",
    "dense_efficiency",
    "step_ms_modelled",
    "error_pct",
    "trivial_error_pct",
    *(f"{phase}_ms" for phase in PHASES),
    "n_seeds",
    "fingerprints",
]


@dataclass(frozen=True)
class Repeated:
    """Runs that differ in nothing that a step's time depends on."""

    runs: list[Run]

    @property
    def run(self) -> Run:
        """One of them."""
        return self.runs[0]

    @property
    def steps_ms(self) -> list[float]:
        """Mean step of each."""
        return [run.step_ms for run in self.runs if run.step_ms is not None]

    @property
    def is_full(self) -> bool:
        """Whether one group holds the tables."""
        return self.run.config.parallelism.num_groups == 1

    @property
    def workload(self) -> str:
        """What a rank computes: its samples, the model, and how tables may be split."""
        config = self.run.config
        kinds = [kind.name for kind in config.parallelism.sharding]
        return json.dumps([self.run.batch_per_rank, kinds, plain(config.model)])

    def modelled_ms(self, config: SimulateConfig) -> float:
        """Step time that the model gives."""
        return 1e3 * self.run.predicted(config).step.total


def repeated(runs: Sequence[Run]) -> list[Repeated]:
    """Shaped runs, repetitions together."""
    groups: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.testbed is not None and run.step_ms is not None:
            settings = {name: value for name, value in plain(run.config).items() if name not in FREE}
            groups[json.dumps([settings, run.testbed], sort_keys=True)].append(run)
    return [Repeated(of_layout) for of_layout in groups.values()]


def fitted(config: SimulateConfig, points: Sequence[Repeated]) -> SimulateConfig:
    """The options with the dense part's efficiency that meets the points best, by the logarithm of step times.

    On the CPU of a testbed it is all that computing costs, Python and the switching between ranks included.
    """
    if not points:
        return config
    from scipy.optimize import minimize_scalar

    def options(log_efficiency: float) -> SimulateConfig:
        return replace(config, constants=replace(config.constants, dense_efficiency=float(np.exp(log_efficiency))))

    def loss(log_efficiency: float) -> float:
        trial = options(log_efficiency)
        return sum(float(np.log(point.modelled_ms(trial) / mean(point.steps_ms))) ** 2 for point in points)

    return options(minimize_scalar(loss, bounds=(np.log(1e-6), 0.0), method="bounded").x)


def fit_points(layouts: Sequence[Repeated]) -> list[Repeated]:
    """One group (full model parallelism, or 2D with M = 1) on the most ranks; on fewer it is predicted, as 2D is."""
    full = [layout for layout in layouts if layout.is_full]
    most = max((layout.run.num_ranks for layout in full), default=0)
    return [layout for layout in full if layout.run.num_ranks == most]


def fits(layouts: Sequence[Repeated], config: SimulateConfig) -> dict[str, SimulateConfig]:
    """For each workload the options that were fitted on its own points, or the given ones if it has none."""
    points = fit_points(layouts)
    workloads = dict.fromkeys(layout.workload for layout in layouts)
    return {key: fitted(config, [point for point in points if point.workload == key]) for key in workloads}


def step_rows(layouts: Sequence[Repeated], options: Mapping[str, SimulateConfig]) -> list[Row]:
    """Measured and modelled steps; ``trivial`` is the error of saying that a layout is as fast as full MP.

    Args:
        layouts: measured.
        options: of each workload, as ``fits`` gives them.
    """
    rows = []
    fit_on = fit_points(layouts)
    for layout in layouts:
        measured = mean(layout.steps_ms)
        step = layout.run.predicted(options[layout.workload]).step
        key = layout.workload, layout.run.num_ranks, layout.run.testbed
        same = [other for other in layouts if (other.workload, other.run.num_ranks, other.run.testbed) == key]
        full = [mean(other.steps_ms) for other in same if other.is_full]
        testbed = layout.run.testbed or {}
        row = {name: testbed[name] for name in ("hosts", "ranks_per_host", "inter_host_mbit")} | {
            "role": "fit" if layout in fit_on else "prediction",
            "step_ms": measured,
            "step_ms_std": stdev(layout.steps_ms) if len(layout.steps_ms) > 1 else None,
            "dense_efficiency": options[layout.workload].constants.dense_efficiency,
            "step_ms_modelled": 1e3 * step.total,
            "error_pct": 100 * (1e3 * step.total / measured - 1),
            "trivial_error_pct": 100 * (mean(full) / measured - 1) if full and not layout.is_full else None,
            "n_seeds": len(layout.runs),
            "fingerprints": " ".join(sorted(run.record["fingerprint"] for run in layout.runs)),
        }
        rows.append(row | {f"{phase}_ms": 1e3 * seconds for phase, seconds in asdict(step).items()})
    return rows


def steps_table(rows: Sequence[Row]) -> Table:
    """What a reader compares."""
    cells = [
        [
            row["label"],
            row["role"],
            str(row["num_ranks"]),
            str(row["num_groups"]),
            row["replicas"].split("_")[0],
            row["sharding"],
            "-" if row["sync_interval"] is None else f"{row['sync_rows']} {row['sync_interval']}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_modelled']:.1f}",
            f"{row['error_pct']:+.1f}",
            "-" if row["trivial_error_pct"] is None else f"{row['trivial_error_pct']:+.1f}",
        ]
        for row in rows
    ]
    headings = ["label", "role", "T", "M", "replicas", "sharding", "rows K", "step ms", "modelled", "err %", "trivial"]
    caption = "trivial: error in % of taking every layout for as fast as full model parallelism of the same workload"
    return text_table("steps on shaped links", headings, cells, caption)
