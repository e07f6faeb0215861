"""NE gap of each c against the learning rate, and against lr * sqrt(c): is c more than a learning rate?"""

import math
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, needed, read, save, seeds_of, use_style

FULL_MP: dict[str, Any] = {"color": "0.5", "marker": "v", "linestyle": (0, (1, 1))}


def draw(left: Axes, right: Axes, rows: pd.DataFrame) -> None:
    """One data set; both panels show the same gaps, to full MP at its best learning rate."""
    scales = sorted(rows.loc[rows["parallelism"] == "sparse_2d", "moment_scale"].unique())
    groups = rows["num_groups"].max()
    rows = rows.sort_values("table_lr")
    full_mp, two_d = rows[rows["parallelism"] == "full_mp"], rows[rows["parallelism"] == "sparse_2d"]
    for axes, power in ((left, 0.0), (right, 0.5)):
        axes.axhline(0, color="0.4", linewidth=1)
        for scale, style in zip(scales, cycle(SERIES), strict=False):
            series = rows[(rows["parallelism"] == "sparse_2d") & (rows["moment_scale"] == scale)].sort_values(
                "table_lr"
            )
            axes.errorbar(
                series["table_lr"] * scale**power,
                series["ne_gap_best_lr_pct"],
                yerr=series["ne_gap_best_lr_pct_ci95"],
                label=f"2D, c = {_name(scale, groups)}",
                capsize=3,
                **style,
            )
        spread = full_mp["ne_gap_best_lr_pct_ci95"]
        axes.errorbar(full_mp["table_lr"], full_mp["ne_gap_best_lr_pct"], spread, label="full MP", capsize=3, **FULL_MP)
        axes.set_xscale("log")
        axes.set_ylim(top=min(axes.get_ylim()[1], 6))
    first = two_d.iloc[0]
    left.set_title(
        f"{first['data']}: M {groups:.0f}, B {first['global_batch_size']:.0f}, {seeds_of(rows)} ({first['label']})",
        fontsize=8,
    )
    right.set_title("the same gaps against the rate that c makes of lr", fontsize=8)
    left.set_xlabel("lr")
    right.set_xlabel("lr x sqrt(c)")
    left.set_ylabel("NE gap to full MP at its best lr (%)\nlower is better")


def _name(scale: float, groups: float) -> str:
    names = {1.0: "1", math.sqrt(groups): "sqrt(M)", groups: "M", groups**2: "M^2"}
    return next((name for value, name in names.items() if math.isclose(value, scale, rel_tol=1e-6)), f"{scale:g}")


def main() -> None:
    """Draw ``results/tables/moment_scale.csv``, a row of panels for each data set."""
    use_style()
    table = read("moment_scale")
    table = table[table["parallelism"] != "constant"]
    parts = [rows for _, rows in table.groupby(["data", "settings"]) if (rows["parallelism"] == "sparse_2d").any()]
    needed(parts, "run of 2D")
    figure, grid = plt.subplots(len(parts), 2, figsize=(8.4, 3.4 * len(parts)), squeeze=False, sharey="row")
    for (left, right), rows in zip(grid, parts, strict=True):
        draw(left, right, rows)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, "moment_scale")


if __name__ == "__main__":
    main()
