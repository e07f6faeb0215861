"""QPS, and bytes between hosts, against K and against N."""

import matplotlib.pyplot as plt
from style import SERIES, needed, read, save, use_style

# Table: its axis, and what that is.
AXES = {
    "sync_interval_qps": ("sync_interval", "K, steps between averagings"),
    "group_size": ("group_size", "N, ranks that share one copy of the tables"),
}


def main() -> None:
    """Draw ``sync_interval_qps.csv`` and ``group_size.csv``, a column for each; bars are the range of repetitions."""
    use_style()
    tables = {name: read(name) for name in AXES}
    figure, grid = plt.subplots(2, len(AXES), figsize=(8, 5), sharey="row", sharex="col")
    for column, (name, (axis, text)) in enumerate(AXES.items()):
        table = tables[name]
        full_mp = needed(table[table["parallelism"] == "full_mp"], f"run of full MP ({name})").iloc[0]
        rows = needed(table[table["parallelism"] == "sparse_2d"], f"run of 2D ({name})").sort_values(axis)
        spread = [rows["qps"] - rows["qps_min"], rows["qps_max"] - rows["qps"]]
        grid[0][column].errorbar(rows[axis], rows["qps"], yerr=spread, capsize=3, label="2D", **SERIES[1])
        grid[1][column].plot(rows[axis], rows["between_hosts_bytes"] / 1e6, **SERIES[1])
        fixed = (
            f"M = {rows['num_groups'].iloc[0]}"
            if axis == "sync_interval"
            else f"K = {rows['sync_interval'].iloc[0]:.0f}"
        )
        grid[0][column].set_title(
            f"{full_mp['num_ranks']} ranks, {full_mp['sharding'].replace('_', '-')}, {fixed} ({full_mp['label']})",
            fontsize=8,
        )
        for axes, value in zip(grid[:, column], (full_mp["qps"], full_mp["between_hosts_bytes"] / 1e6), strict=True):
            axes.axhline(value, label="full MP", color="0.4", linestyle=":")
            axes.set_xscale("log", base=2)
            axes.set_xticks(rows[axis], [f"{number:.0f}" for number in rows[axis]])
        grid[1][column].set_xlabel(text, fontsize=8)
    for row in grid:
        row[0].set_ylim(0, 1.05 * max(axes.dataLim.y1 for axes in row))
    grid[0][0].set_ylabel("QPS")
    grid[1][0].set_ylabel("MB a step\nfrom a host to others")
    grid[0][0].legend(fontsize=8)
    save(figure, "qps_tradeoffs")


if __name__ == "__main__":
    main()
