"""Where a step's time goes under full model parallelism and 2D: the cost model's parts for the ExFM-like workload."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from style import needed, read, save, use_style

# Columns of the table, from the bottom of a bar up; greys and hatches tell them apart without colour.
PARTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dense part and its all-reduce": (["dense_ms", "dense_all_reduce_ms"], {"color": "#BBBBBB"}),
    "lookup and table update": (["lookup_ms", "update_ms"], {"color": "#009E73", "hatch": "..."}),
    "all-to-alls of pooled rows and gradients": (
        ["input_dist_ms", "output_dist_ms", "gradient_dist_ms"],
        {"color": "#D55E00", "hatch": "///"},
    ),
    "averaging of replicas": (["averaging_ms"], {"color": "#0072B2", "hatch": "xxx"}),
}
LAYOUTS = {"full_mp": "full MP", "sparse_2d": "2D"}


def main() -> None:
    """Draw ``results/tables/exfm_scaling.csv``: two bars for each T, of what a step waits for."""
    use_style()
    table = read("exfm_scaling")
    rows = needed(table[(table["label"] == "modelled") & (table["num_gpus"] > 256)], "modelled row above 256 GPUs")
    rows = rows.sort_values(["num_gpus", "parallelism"])
    places = rows["num_gpus"].map({size: index for index, size in enumerate(sorted(rows["num_gpus"].unique()))})
    x = (places + np.where(rows["parallelism"] == "full_mp", -0.2, 0.2)).to_numpy()
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    bottom = np.zeros(len(rows))
    for label, (columns, look) in PARTS.items():
        height = rows[columns].sum(axis=1).to_numpy()
        axes.bar(x, height, 0.36, bottom, label=label, edgecolor="white", linewidth=0.5, **look)
        bottom += height
    for place, top, (_, row) in zip(x, bottom, rows.iterrows(), strict=True):
        name = LAYOUTS[row["parallelism"]] + ("\n(out of memory)" if row["oom"] else "")
        axes.annotate(name, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(sorted(set(places)), [f"{size}" for size in sorted(rows["num_gpus"].unique())])
    axes.set_xlabel("GPUs T (2D: groups of N = 256)")
    axes.set_ylabel("ms of a step (modelled)")
    axes.set_ylim(0, bottom.max() * 1.15)
    axes.grid(visible=False, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    save(figure, "step_time")


if __name__ == "__main__":
    main()
