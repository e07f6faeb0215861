"""NE gap to full model parallelism by rule, against what a study varies: what its figure has in common with others'."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import RULES, common_legend, needed, read, rule_of, save, seeds_of, use_style

PANELS_PER_ROW = 2
# The interval of fewer is too wide to show anything; comparisons of fewer are drawn where there are no others.
MIN_SEEDS = 3


def draw_study(name: str, axis: str, label: str, *, places: bool = True) -> None:
    """Draw ``results/tables/<name>.csv``, a panel for each comparison of rules, and save it under that name.

    Args:
        name: of the table.
        axis: its column that gaps are drawn against; ``unscaled`` is the table optimizer, whatever the c.
        label: of the axis.
        places: whether values are that many places beside each other, rather than numbers.
    """
    use_style()
    table = read(name)
    table = table.assign(unscaled=table["optimizer"].astype(str).str.removeprefix("momentum_scaled_"))
    enough = table["n_seeds"] >= MIN_SEEDS
    table["ne_gap_pct_ci95"] = table["ne_gap_pct_ci95"].where(enough)
    parts = _panels(table[enough], axis) or _panels(table, axis)
    needed(parts, "two rules to compare")
    across = min(PANELS_PER_ROW, len(parts))
    down = -(-len(parts) // across)
    figure, grid = plt.subplots(down, across, figsize=(4.6 * across, 3.2 * down), squeeze=False)
    for axes, (title, rows) in zip(grid.flat, parts, strict=False):
        _draw(axes, rows, axis, places)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel(label)
    for axes in list(grid.flat)[len(parts) :]:
        axes.set_visible(False)
    for left in grid[:, 0]:
        how = "95 % intervals; " if any(rows["ne_gap_pct_ci95"].notna().any() for _, rows in parts) else ""
        left.set_ylabel(f"NE gap to full MP (%)\n{how}lower is better", fontsize=8)
    common_legend(figure, grid.flat, 3 * across)
    save(figure, name)


def _panels(table: pd.DataFrame, axis: str) -> list[tuple[str, pd.DataFrame]]:
    """Title and rows of each comparison: of those that differ in the axis alone, one panel."""
    # Each optimizer has a learning rate of its own.
    shared = {"table_lr": "lr {:g}"} if axis != "unscaled" else {}
    shared |= {"num_groups": "M {:.0f}"} if axis != "num_groups" else {}
    found = []
    shown = table[table["parallelism"] == "sparse_2d"]
    for (data, *values), rows in shown.groupby(["data", *shared]):
        if len(set(rule_of(rows))) > 1 and rows[axis].nunique() > 1:
            parts = [text.format(value) for text, value in zip(shared.values(), values, strict=True)]
            found.append((f"{data}: {', '.join([*parts, seeds_of(rows)])} ({rows['label'].iloc[0]})", rows))
    return found


def _draw(axes: Axes, rows: pd.DataFrame, axis: str, places: bool) -> None:
    """One line for each rule."""
    axes.axhline(0, color="0.4", linewidth=1, label="full MP")
    values = sorted(rows[axis].unique())
    names = isinstance(values[0], str)
    for rule, (label, style) in RULES.items():
        series = rows[rule_of(rows) == rule].sort_values(axis)
        if not series.empty:
            x = series[axis].map(values.index) if places else series[axis]
            # Names have no order that a line could follow.
            looks = style | {"linestyle": "none"} if names else style
            axes.errorbar(x, series["ne_gap_pct"], series["ne_gap_pct_ci95"], label=label, capsize=3, **looks)
    if places:
        axes.set_xticks(range(len(values)), [value if names else f"{value:.0f}" for value in values])
