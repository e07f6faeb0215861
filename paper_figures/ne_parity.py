"""NE gap to full model parallelism against the number of groups M, by rule."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import RULES, needed, powers_of_two, read, rule_of, save, seeds_of, use_style


def draw(axes: Axes, rows: pd.DataFrame) -> None:
    """One comparison: the same data, batch size and learning rate in every run."""
    axes.axhline(0, color="0.4", linewidth=1, label="full model parallelism")
    two_d = rows[rows["parallelism"] == "sparse_2d"]
    for rule, (label, style) in RULES.items():
        series = two_d[rule_of(two_d) == rule].sort_values("num_groups")
        if not series.empty:
            axes.errorbar(
                series["num_groups"], series["ne_gap_pct"], series["ne_gap_pct_ci95"], label=label, capsize=3, **style
            )
    first = rows.iloc[0]
    axes.set_title(
        f"{first['data']}: B {first['global_batch_size']:.0f}, lr {first['table_lr']:g}, "
        f"{first['num_ranks']:.0f} ranks, {seeds_of(two_d)} ({first['label']})",
        fontsize=8,
    )
    powers_of_two(axes, two_d["num_groups"])
    axes.set_xlabel("number of groups M (replicas of each shard)")


def main() -> None:
    """Draw ``results/tables/ne_parity.csv``, one panel for each comparison in it that has several M."""
    use_style()
    table = read("ne_parity")
    panels = [
        rows
        for _, rows in table[table["parallelism"] != "constant"].groupby(["data", "settings", "table_lr"])
        if rows.loc[rows["parallelism"] == "sparse_2d", "num_groups"].nunique() > 1
    ]
    needed(panels, "comparison of several M")
    figure, grid = plt.subplots(1, len(panels), figsize=(max(5, 4.6 * len(panels)), 3.6), squeeze=False, sharey=True)
    for axes, rows in zip(grid[0], panels, strict=True):
        draw(axes, rows)
    grid[0][0].set_ylabel(
        "NE gap to full MP (%), held-out rows\n95 % intervals where there are several seeds", fontsize=8
    )
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, "ne_parity")


if __name__ == "__main__":
    main()
