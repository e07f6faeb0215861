"""Fits the free constants on published points of full model parallelism, and nothing else."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sparse2d.cost.config import FREE, ConstantsConfig, SimulateConfig
from sparse2d.cost.model import predict
from sparse2d.cost.paper import Published, published
from sparse2d.cost.show import WIDTH, text_table
from sparse2d.cost.workload import Workload, make_workload
from sparse2d.errors import UserError

log = logging.getLogger("sparse2d.simulate")


@dataclass(frozen=True)
class Fit:
    """Fitted constants, which of them were free, and the points they were fitted on."""

    constants: ConstantsConfig
    free: list[str]
    points: list[Published]

    def at_bound(self, name: str) -> bool:
        """Whether a constant was fitted to an end of its plausible range: a sign that the model lacks something."""
        value, free = getattr(self.constants, name), FREE[name]
        return name in self.free and min(value - free.low, free.high - value) < 1e-3 * (free.high - free.low)


def fit_points(config: SimulateConfig) -> list[Published]:
    """Published QPS of full model parallelism at ``fit_num_gpus``.

    Raises:
        UserError: if there is no such point.
    """
    paper = config.workload.paper
    if paper is None:
        raise UserError(f"nothing is published of workload {config.workload.name}; take workload=exfm_like or ctr_like")
    points = [point for point in published(paper) if point.parallelism == "full_mp" and point.qps is not None]
    chosen = [point for point in points if point.num_gpus in config.fit_num_gpus]
    if not chosen:
        raise UserError(
            f"fit_num_gpus={config.fit_num_gpus}: {paper} has full model parallelism at "
            f"{[point.num_gpus for point in points]} GPUs"
        )
    return chosen


def fit(config: SimulateConfig, workload: Workload, points: Sequence[Published]) -> Fit:
    """Least squares of log QPS, with as many free constants as there are points; the others stay as they are.

    They are freed in the order of ``FREE``: the first sets the level, the others how it falls with T.
    """
    # Takes half a second to import, which a single prediction need not pay.
    from scipy.optimize import least_squares

    free = list(FREE)[: len(points)]
    low, high = np.array([(FREE[name].low, FREE[name].high) for name in free]).T

    def constants(values: Sequence[float]) -> ConstantsConfig:
        found: dict[str, Any] = dict(zip(free, map(float, values), strict=True))
        return replace(config.constants, **found)

    def residuals(values: Sequence[float]) -> list[float]:
        errors = []
        for point in points:
            assert point.qps is not None
            trial = at(config, point.num_gpus, point.num_groups, constants(values))
            errors.append(float(np.log(predict(trial, workload).qps / point.qps)))
        return errors

    start = np.clip([getattr(config.constants, name) for name in free], low + 1e-6, high - 1e-6)
    solution = least_squares(residuals, start, bounds=(low, high), x_scale=high - low)
    return Fit(replace(constants(solution.x), fitted_on=[point.key for point in points]), free, list(points))


def at(config: SimulateConfig, num_gpus: int, num_groups: int, constants: ConstantsConfig) -> SimulateConfig:
    """The options with another layout and other constants."""
    layout = replace(config.parallelism, num_groups=num_groups)
    return replace(config, num_gpus=num_gpus, parallelism=layout, constants=constants)


def calibrate(config: SimulateConfig) -> None:
    """Fit and print the constants, as lines for a file of ``conf/constants/``."""
    fitted = fit(config, make_workload(config.workload), fit_points(config))
    console = Console(width=WIDTH)
    console.print(constants_table(fitted))
    lines = [f"{name}: {getattr(fitted.constants, name):.4f}" for name in FREE]
    console.print(
        "\n".join([*lines, f"fitted_on: [{', '.join(fitted.constants.fitted_on)}]"]), highlight=False, markup=False
    )


def constants_table(fitted: Fit) -> Table:
    """The constants with meaning, range, and whether they were fitted."""
    rows = []
    for name, free in FREE.items():
        origin = "fitted" if name in fitted.free else "held"
        if fitted.at_bound(name):
            origin += ", at the end of its range"
        rows.append(
            [name, f"{getattr(fitted.constants, name):.4f}", f"{free.low:g} to {free.high:g}", origin, free.meaning]
        )
    title = f"constants, fitted on full MP at {', '.join(str(point.num_gpus) for point in fitted.points)} GPUs"
    return text_table(title, ["constant", "value", "plausible", "origin", "meaning (unit: a share)"], rows)
