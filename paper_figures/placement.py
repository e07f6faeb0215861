"""Where a step goes with replicas inside a host and across hosts, for all rows and touched rows, K = 1 and 8."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from style import needed, read, save, use_style

# Phases that are drawn as one, with their grey value and hatching.
PARTS = {
    "lookups": (["input_distribution_ms", "lookup_ms", "output_distribution_ms"], "#0072B2", ""),
    "averaging": (["averaging_ms"], "#D55E00", "///"),
    "dense part, updates and the rest": (
        ["data_ms", "dense_ms", "table_update_ms", "dense_all_reduce_ms", "optimizer_ms"],
        "0.75",
        "",
    ),
}


def label(row: pd.Series) -> str:
    """What a bar stands for."""
    if row["parallelism"] == "full_mp":
        return "full MP"
    where = {"intra_host": "inside", "inter_host": "across"}[row["replicas"]]
    return f"{where}, {row['sync_rows']}, K = {row['sync_interval']:.0f}"


def main() -> None:
    """Draw ``results/tables/placement.csv``, a panel for each kind of lookups."""
    use_style()
    table = read("placement")
    kinds = needed(sorted(table["sharding"].unique()), "runs")
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.8), squeeze=False, sharey=True)
    for axes, kind in zip(panels[0], kinds, strict=True):
        rows = table[table["sharding"] == kind]
        order = ["parallelism", "sync_rows", "sync_interval", "replicas"]
        rows = rows.sort_values(order, ascending=[False, False, False, False], na_position="last")
        places, left = np.arange(len(rows)), np.zeros(len(rows))
        for name, (phases, color, hatch) in PARTS.items():
            widths = rows[phases].sum(axis=1).to_numpy()
            axes.barh(places, widths, left=left, label=name, color=color, hatch=hatch, edgecolor="white")
            left += widths
        axes.set_yticks(places, [label(row) for _, row in rows.iterrows()], fontsize=7)
        for place, (_, row), end in zip(places, rows.iterrows(), left, strict=True):
            if row["parallelism"] != "full_mp":
                axes.annotate(f" {row['ratio_to_full_mp']:.2f}x", (end, place), va="center", fontsize=7)
        axes.set_title(f"{kind.replace('_', '-')} lookups ({rows['label'].iloc[0]})", fontsize=8)
        axes.set_xlabel("ms of a step, mean over ranks\n(numbers: QPS over full MP's)")
        axes.set_xlim(0, 1.12 * max(axes.get_xlim()[1], left.max()))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    save(figure, "placement")


if __name__ == "__main__":
    main()
