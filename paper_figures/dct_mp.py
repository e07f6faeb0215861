"""NE gap to training without compression against how many times fewer bytes the embedding all-to-all sends."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from style import SERIES, name_points, needed, read, save, seeds_of, use_style

METHODS = {
    "dct": ("DCT-MP, density", SERIES[0]),
    "topk": ("top-k of each vector, density", SERIES[2]),
    "qcomm": ("TorchRec's codecs", {**SERIES[1], "linestyle": "none"}),
}


def main() -> None:
    """Draw ``results/tables/dct_mp.csv``, one panel for each comparison in it."""
    use_style()
    table = needed(read("dct_mp"), "runs")
    table["family"] = table["method"].str.split("_").str[0]
    parts = needed([rows for _, rows in table.groupby(["data", "train_rows", "settings", "table_lr"])], "runs")
    figure, grid = plt.subplots(1, len(parts), figsize=(max(6, 4.4 * len(parts)), 4), squeeze=False, sharey=True)
    for axes, rows in zip(grid[0], parts, strict=True):
        axes.axhline(0, color="0.4", linewidth=1, label="nothing compressed")
        axes.axvline(20, color="0.7", linewidth=1, linestyle="--", label="20x (the paper's)")
        for family, (label, style) in METHODS.items():
            series = rows[rows["family"] == family].sort_values("bytes_ratio")
            if series.empty:
                continue
            spread = series["ne_gap_pct_ci95"]
            axes.errorbar(series["bytes_ratio"], series["ne_gap_pct"], spread, label=label, capsize=3, **style)
            codecs = series["method"].str.removeprefix("qcomm_")
            names = codecs if family == "qcomm" else series["density"].map("{:g}".format)
            sides = pd.Series({"qcomm": "right", "topk": "below"}.get(family, "left"), index=series.index)
            # The line of no gap strikes nothing through.
            sides[(sides == "right") & (series["ne_gap_pct"] < 0)] = "below"
            for side, points in series.groupby(sides):
                name_points(axes, points["bytes_ratio"], points["ne_gap_pct"], names[points.index], str(side))
        first = rows.iloc[0]
        axes.set_title(
            f"{first['data']}: {first['train_rows']:,.0f} rows, dim {first['dim']:.0f}, "
            f"{first['num_ranks']:.0f} ranks, {seeds_of(rows)} ({first['label']})",
            fontsize=8,
        )
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        axes.set_ylim(-0.2, 20)
        axes.xaxis.set_major_locator(FixedLocator([2, 4, 8, 16, 32, 64]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator([-0.1, 0, 0.1, 0.3, 1, 3, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("embedding bytes, forward and backward: times fewer")
    grid[0][0].set_ylabel("NE gap (%), held-out rows\nlower is better")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, "dct_mp")


if __name__ == "__main__":
    main()
