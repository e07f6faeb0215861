"""Dense gradients by DCT-DP: NE gap against bytes saved, and, where that was run, what L does to both."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, TABLES, common_legend, name_points, needed, powers_of_two, read, save, seeds_of, use_style

METHODS = {
    "dct": ("DCT-DP", SERIES[0]),
    "dct by parameter": ("DCT-DP, a threshold for each parameter", SERIES[1]),
    "topk": ("top-k of every step", SERIES[2]),
    "powersgd": ("PowerSGD, rank 1", SERIES[3]),
    "bf16": ("bf16", {**SERIES[4], "linestyle": "none"}),
}


def draw_bytes(axes: Axes, table: pd.DataFrame) -> None:
    """NE gap against bytes, a point for each density."""
    by_parameter = (table["method"] == "dct") & (table["scope"] == "parameter")
    methods = table["method"].mask(by_parameter, "dct by parameter")
    for method, (label, look) in METHODS.items():
        rows = table[methods == method].sort_values("steady_bytes_ratio")
        if rows.empty:
            continue
        axes.errorbar(
            rows["steady_bytes_ratio"], rows["ne_gap_pct"], rows["ne_gap_pct_std"], label=label, capsize=3, **look
        )
        named = rows[rows["density"].notna()]
        names = named["density"].map("{:g}".format)
        if method == "dct":
            ends = named["ne_gap_pct"] - named["ne_gap_pct_std"].fillna(0)
            name_points(axes, named["steady_bytes_ratio"], ends, names, "under")
        else:
            name_points(axes, named["steady_bytes_ratio"], named["ne_gap_pct"], names, "left")
    axes.axhline(0, color="0.4", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("times fewer bytes, after warm-up\n(numbers: density)")
    axes.set_ylabel("NE gap to no compression (%)\nlower is better; bars: standard deviation", fontsize=8)


def draw_lifetime(axes: Axes, table: pd.DataFrame, column: str, label: str) -> None:
    """One column against L."""
    rows = table[table["lifetime"].notna()].sort_values("lifetime")
    axes.errorbar(rows["lifetime"], rows[column], rows[f"{column}_std"], capsize=3, **SERIES[0])
    powers_of_two(axes, rows["lifetime"])
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("L, steps that a threshold is kept for")
    axes.set_ylabel(label)


def main() -> None:
    """Draw ``dct_dp.csv`` and, if it is there, ``dct_lifetime.csv``; bars are the standard deviation over seeds."""
    use_style()
    density, path = needed(read("dct_dp"), "runs"), TABLES / "dct_lifetime.csv"
    panels = 3 if path.is_file() else 1
    widths = [1.5, 1, 1][:panels]
    figure, grid = plt.subplots(
        1, panels, figsize=(max(3.4 * panels, 5), 3.6), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    draw_bytes(grid[0][0], density)
    if panels > 1:
        lifetime = needed(read("dct_lifetime"), "runs")
        draw_lifetime(grid[0][1], lifetime, "ne_gap_pct", "NE gap to no compression (%)")
        draw_lifetime(grid[0][2], lifetime, "sent_share", "share of the entries that is sent")
    first, compressed = density.iloc[0], needed(density[density["method"] != "none"], "compressed run")
    figure.suptitle(
        f"{first['data']}, {first['num_ranks']:.0f} ranks, B {first['global_batch_size']:.0f}, "
        f"{seeds_of(compressed)} ({first['label']})",
        fontsize=8,
    )
    common_legend(figure, grid[0][:1], 3)
    save(figure, "dct_dp")


if __name__ == "__main__":
    main()
