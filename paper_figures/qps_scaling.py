"""QPS against the number of ranks, the same rows for each of them: full MP and 2D, for two kinds of lookups."""

import matplotlib.pyplot as plt
from style import SERIES, needed, read, save, use_style

# (parallelism, M, K), label
LAYOUTS = [
    (("full_mp", 1, None), "full MP"),
    (("sparse_2d", 1, 1), "2D, M = 1"),
    (("sparse_2d", 2, 8), "2D, M = 2, K = 8"),
    (("sparse_2d", 4, 8), "2D, M = 4, K = 8"),
    (("sparse_2d", 4, 1), "2D, M = 4, K = 1"),
]


def main() -> None:
    """Draw ``results/tables/qps_scaling.csv``, a panel for each kind of lookups; bars are the range of repetitions."""
    use_style()
    table = read("qps_scaling")
    kinds = needed(sorted(table["sharding"].unique()), "runs")
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.4), squeeze=False)
    for axes, kind in zip(panels[0], kinds, strict=True):
        rows = table[table["sharding"] == kind]
        for ((parallelism, num_groups, interval), label), look in zip(LAYOUTS, SERIES, strict=True):
            of = rows[(rows["parallelism"] == parallelism) & (rows["num_groups"] == num_groups)]
            of = of[of["sync_interval"].isna() if interval is None else of["sync_interval"] == interval]
            of = of.sort_values("num_ranks")
            spread = [of["qps"] - of["qps_min"], of["qps_max"] - of["qps"]]
            axes.errorbar(of["num_ranks"], of["qps"], yerr=spread, label=label, capsize=3, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ranks = sorted(rows["num_ranks"].unique())
        axes.set_xticks(ranks, [str(number) for number in ranks])
        batch = (rows["global_batch_size"] / rows["num_ranks"]).iloc[0]
        axes.set_title(f"{kind.replace('_', '-')}, {batch:.0f} rows a rank ({rows['label'].iloc[0]})", fontsize=8)
        axes.set_xlabel("ranks (two on a host)")
    panels[0][0].set_ylabel("QPS, rows of all ranks a second")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    save(figure, "qps_scaling")


if __name__ == "__main__":
    main()
