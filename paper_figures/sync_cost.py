"""Milliseconds and bytes of one averaging against the size of the table: touched rows and all rows."""

import matplotlib.pyplot as plt
from style import SERIES, needed, read, save, use_style

WAYS = {
    "upstream": "all rows, coalesced all-reduce (as upstream)",
    "all": "all rows (sync.rows=all)",
    "touched": "touched rows (sync.rows=touched)",
    "touched_bf16": "touched rows, bf16 (sync.wire_dtype=bf16)",
}


def main() -> None:
    """Draw ``results/tables/sync_cost.csv``, a column for each number of ranks."""
    use_style()
    table = read("sync_cost")
    ranks = needed(sorted(table["num_ranks"].unique()), "rounds")
    figure, grid = plt.subplots(
        2, len(ranks), figsize=(4.2 * len(ranks), 5.6), squeeze=False, sharex=True, sharey="row"
    )
    for column, num_ranks in enumerate(ranks):
        rows = table[table["num_ranks"] == num_ranks]
        for (way, label), style in zip(WAYS.items(), SERIES, strict=False):
            series = rows[rows["rows"] == way].sort_values("table_rows")
            grid[0][column].errorbar(
                series["table_rows"], series["ms"], yerr=series["ms_std"], label=label, capsize=3, **style
            )
            grid[1][column].plot(series["table_rows"], series["bytes"] / 1e6, **style)
        first = rows.iloc[0]
        grid[0][column].set_title(
            f"{num_ranks} ranks, M = {first['num_groups']:.0f}, {first['lookups_per_rank']:.0f} lookups a rank, "
            f"dim {first['dim']:.0f} ({first['label']})",
            fontsize=8,
        )
        grid[1][column].set_xlabel("rows of the table")
        for axes in grid[:, column]:
            axes.set_xscale("log")
            axes.set_yscale("log")
    grid[0][0].set_ylabel("ms of one averaging\n(slowest rank, median)")
    grid[1][0].set_ylabel("MB sent by a rank\n(counted on the interface)")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ranks), fontsize=8)
    save(figure, "sync_cost")


if __name__ == "__main__":
    main()
