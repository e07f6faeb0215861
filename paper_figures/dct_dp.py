"""Dense gradients by DCT-DP: NE gap against bytes saved, and what the threshold's lifetime L does to both."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, TABLES, powers_of_two, save, use_style

METHODS = {"dct": "DCT-DP", "topk": "top-k of every step", "powersgd": "PowerSGD, rank 1", "bf16": "bf16"}


def draw_bytes(axes: Axes, table: pd.DataFrame) -> None:
    """NE gap against bytes, a point for each density."""
    for (method, label), look in zip(METHODS.items(), SERIES, strict=True):
        rows = table[table["method"] == method].sort_values("steady_bytes_ratio")
        if rows.empty:
            continue
        axes.errorbar(
            rows["steady_bytes_ratio"], rows["ne_gap_pct"], rows["ne_gap_pct_std"], label=label, capsize=3, **look
        )
        for _, row in rows[rows["density"].notna()].iterrows():
            place = (row["steady_bytes_ratio"], row["ne_gap_pct"])
            axes.annotate(f"{row['density']:g}", place, (4, 5), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="0.4", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes, after warm-up\n(numbers: density)")
    axes.set_ylabel("NE gap to no compression (%)\nlower is better")
    axes.legend(fontsize=7)


def draw_lifetime(axes: Axes, table: pd.DataFrame, column: str, label: str) -> None:
    """One column against L."""
    rows = table[table["lifetime"].notna()].sort_values("lifetime")
    axes.errorbar(rows["lifetime"], rows[column], rows[f"{column}_std"], capsize=3, **SERIES[0])
    powers_of_two(axes, rows["lifetime"])
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("L, steps that a threshold is kept for")
    axes.set_ylabel(label)


def main() -> None:
    """Draw ``results/tables/dct_dp.csv`` and ``dct_lifetime.csv``; bars are the standard deviation over seeds."""
    use_style()
    density, lifetime = (pd.read_csv(TABLES / f"{name}.csv") for name in ("dct_dp", "dct_lifetime"))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.4))
    draw_bytes(left, density)
    draw_lifetime(middle, lifetime, "ne_gap_pct", "NE gap to no compression (%)")
    draw_lifetime(right, lifetime, "sent_share", "share of the entries that is sent")
    first = density.iloc[0]
    figure.suptitle(
        f"{first['data']}, {first['num_ranks']:.0f} ranks, B {first['global_batch_size']:.0f}, "
        f"{int(density['n_seeds'].max())} seeds ({first['label']})",
        fontsize=8,
    )
    save(figure, "dct_dp")


if __name__ == "__main__":
    main()
