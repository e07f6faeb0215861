"""Published points (label ``paper``), from the tables of arXiv 2508.03854 as a public summary gives them."""

import csv
from dataclasses import dataclass
from importlib.resources import files

from sparse2d.errors import UserError


@dataclass(frozen=True)
class Published:
    """One published point; None where nothing was published."""

    model: str
    source: str
    num_gpus: int
    parallelism: str
    num_groups: int
    qps: float | None
    scaling_factor_pct: float | None
    peak_memory_pct: float | None
    imbalance: float | None
    oom: bool

    @property
    def key(self) -> str:
        """As ``constants.fitted_on`` names it."""
        return point_key(self.model, self.num_gpus, self.num_groups)


def point_key(model: str | None, num_gpus: int, num_groups: int) -> str:
    """Names a point: ``exfm 1024 4``."""
    return f"{model} {num_gpus} {num_groups}"


def published(model: str) -> list[Published]:
    """The points of one model.

    Raises:
        UserError: if there are none.
    """
    text = files("sparse2d.cost").joinpath("paper.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    points = [_point(row) for row in rows if row["model"] == model]
    if not points:
        raise UserError(f"paper={model}: nothing published; choose from {sorted({row['model'] for row in rows})}")
    return points


def _point(row: dict[str, str]) -> Published:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    return Published(
        model=row["model"],
        source=row["source"],
        num_gpus=int(row["num_gpus"]),
        parallelism=row["parallelism"],
        num_groups=int(row["num_groups"]),
        qps=number("qps"),
        scaling_factor_pct=number("scaling_factor_pct"),
        peak_memory_pct=number("peak_memory_pct"),
        imbalance=number("imbalance"),
        oom=row["oom"] == "True",
    )
