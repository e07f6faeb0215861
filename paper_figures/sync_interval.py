"""NE gap to full model parallelism against K, by rule and by what becomes of the moments."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator
from style import RULES, common_legend, needed, powers_of_two, read, rule_of, save, seeds_of, use_style

# With c = M, beside moments averaged with the weights (RULES).
MOMENTS = {
    "delayed": ("c = M, moments delayed", {"color": "#56B4E9", "marker": "<", "linestyle": ":"}),
    "never": ("c = M, moments never", {"color": "#E69F00", "marker": ">", "linestyle": "--"}),
}

TICKS = [-5, -2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1, 2, 5, 10, 20, 50, 100, 200]


def draw(axes: Axes, rows: pd.DataFrame) -> None:
    """One comparison: the same data, batch size and learning rate in every run."""
    axes.axhline(0, color="0.4", linewidth=1, label="full MP")
    averaged = rows[rows["sync_moments"] == "with_weights"]
    lines = {label: (averaged[rule_of(averaged) == rule], style) for rule, (label, style) in RULES.items()}
    lines |= {label: (rows[rows["sync_moments"] == moments], style) for moments, (label, style) in MOMENTS.items()}
    for label, (series, style) in lines.items():
        series = series[series["parallelism"] == "sparse_2d"].sort_values("sync_interval")
        if not series.empty:
            spread = series["ne_gap_pct_ci95"]
            axes.errorbar(series["sync_interval"], series["ne_gap_pct"], spread, label=label, capsize=3, **style)
    first = rows[rows["parallelism"] == "sparse_2d"].iloc[0]
    axes.set_title(
        f"{first['data']}: M {first['num_groups']:.0f}, B {first['global_batch_size']:.0f}, lr {first['table_lr']:g}, "
        f"{seeds_of(rows)} ({first['label']})",
        fontsize=8,
    )
    powers_of_two(axes, rows["sync_interval"])
    # Near zero linear: the rules differ by hundredths there, and by tens far away.
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("K, steps between averagings")


def main() -> None:
    """Draw ``results/tables/sync_interval.csv``, one panel for each comparison in it."""
    use_style()
    table = read("sync_interval")
    parts = [
        rows
        for _, rows in table[table["parallelism"] != "constant"].groupby(["data", "settings", "table_lr"])
        if (rows["parallelism"] == "sparse_2d").any()
    ]
    needed(parts, "run of 2D")
    figure, grid = plt.subplots(1, len(parts), figsize=(max(6, 4.4 * len(parts)), 4), squeeze=False, sharey=True)
    for axes, rows in zip(grid[0], parts, strict=True):
        draw(axes, rows)
    # A margin in the axis' own scale would be mostly blank below zero.
    shown = pd.concat(parts)
    spread = shown["ne_gap_pct_ci95"].fillna(0)
    grid[0][0].set_ylim((shown["ne_gap_pct"] - spread).min() - 0.1, (shown["ne_gap_pct"] + spread).max() * 1.2)
    grid[0][0].set_ylabel("NE gap to full MP (%), held-out rows\nlower is better; logarithmic above 1")
    common_legend(figure, grid[0], 3)
    save(figure, "sync_interval")


if __name__ == "__main__":
    main()
