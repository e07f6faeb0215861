"""NE gap to full model parallelism against the number of groups M, with c = 1 and with c = M."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, TABLES, powers_of_two, save, use_style

OPTIMIZERS = {
    "rowwise_adagrad": "2D, row-wise AdaGrad (c = 1)",
    "momentum_scaled_rowwise_adagrad": "2D, momentum-scaled (c = M)",
}


def draw(axes: Axes, rows: pd.DataFrame) -> None:
    """One comparison: the same data, batch size and learning rate in every run."""
    axes.axhline(0, color="0.4", linewidth=1, label="full model parallelism")
    for (optimizer, label), style in zip(OPTIMIZERS.items(), SERIES, strict=False):
        series = rows[(rows["parallelism"] == "sparse_2d") & (rows["optimizer"] == optimizer)].sort_values("num_groups")
        # One seed has no spread.
        spread = series["ne_gap_pct_std"] if series["n_seeds"].gt(1).all() else None
        axes.errorbar(series["num_groups"], series["ne_gap_pct"], yerr=spread, label=label, capsize=3, **style)
    first = rows.iloc[0]
    seeds = int(rows["n_seeds"].max())
    axes.set_title(
        f"{first['data']}: B {first['global_batch_size']:.0f}, lr {first['table_lr']:g}, "
        f"{first['num_ranks']:.0f} ranks, {seeds} seed{'s' if seeds > 1 else ''} ({first['label']})",
        fontsize=9,
    )
    powers_of_two(axes, rows.loc[rows["parallelism"] == "sparse_2d", "num_groups"])
    axes.set_xlabel("number of groups M (replicas of each shard)")


def main() -> None:
    """Draw ``results/tables/ne_parity.csv``, one panel for each comparison in it."""
    use_style()
    table = pd.read_csv(TABLES / "ne_parity.csv")
    panels = [rows for _, rows in table.groupby(["data", "settings"])]
    figure, grid = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False, sharey=True)
    for axes, rows in zip(grid[0], panels, strict=True):
        draw(axes, rows)
    grid[0][0].set_ylabel("NE gap to full MP (%), held-out rows\nlower is better")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if len(panels) == 1 else 3
    )
    save(figure, "ne_parity")


if __name__ == "__main__":
    main()
