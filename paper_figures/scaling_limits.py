"""What stops full model parallelism from scaling: lookup all-to-alls, memory, imbalance (cost model)."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, powers_of_two, read, save, use_style


def modelled(name: str) -> pd.DataFrame:
    """The modelled rows of a table that have a placement."""
    table = read(name)
    return table[(table["label"] == "modelled") & table["step_ms"].notna()]


def draw_latency(axes: Axes) -> None:
    """One all-to-all of pooled rows."""
    rows = modelled("lookup_latency")
    for (layout, name), style in zip({"full_mp": "full MP", "sparse_2d": "2D, N = 256"}.items(), SERIES, strict=False):
        of_layout = rows[rows["parallelism"] == layout]
        axes.plot(of_layout["num_gpus"], of_layout["all_to_all_ms"], **style, label=name)
    axes.axhline(600, color="0.4", linewidth=0.8)
    axes.annotate("above this near 1000 GPUs (paper)", (128, 620), color="0.4", fontsize=7)
    axes.set_ylabel("one lookup all-to-all (ms)")
    axes.set_title("exfm_like", fontsize=8)


def draw_memory(axes: Axes) -> None:
    """Parts of the fullest GPU's memory."""
    table = modelled("memory_scaling")
    layouts = {
        "full MP": table["parallelism"] == "full_mp",
        "2D, N = 256": table["group_size"].eq(256) & table["num_groups"].gt(1),
    }
    parts = {"weights_gb": "tables", "activations_gb": "ids and pooled rows"}
    series = [(layout, column) for layout in layouts for column in parts]
    for (layout, column), style in zip(series, SERIES, strict=False):
        rows = table[layouts[layout]]
        axes.plot(rows["num_gpus"], rows[column], **style, label=f"{layout}: {parts[column]}")
    axes.plot(1024, 15, "*", color="0.4", ms=9, label="ids and pooled rows (paper)")
    axes.set_ylabel("memory of the fullest GPU (GB)")
    axes.set_title("exfm_like, without the dense part", fontsize=8)


def draw_imbalance(axes: Axes) -> None:
    """Max / mean of lookups over the ranks."""
    names = {"imbalance": "table- and row-wise", "imbalance_column_wise": "and column-wise"}
    for (table, name), style in zip(names.items(), SERIES, strict=False):
        rows = modelled(table)
        axes.plot(rows["num_gpus"], rows["imbalance"], **style, label=name)
    paper = read("imbalance").query("label == 'paper'")
    axes.plot(paper["group_size"], paper["imbalance"], "*", color="0.4", ms=9, label="paper")
    axes.set_ylabel("imbalance of lookups (max / mean)")
    axes.set_title("ctr_like (fitted to N = 64 and 256)", fontsize=8)


def main() -> None:
    """Draw ``lookup_latency``, ``memory_scaling`` and ``imbalance``."""
    use_style()
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.4))
    for axes, draw in zip(panels, (draw_latency, draw_memory, draw_imbalance), strict=True):
        draw(axes)
        powers_of_two(axes, axes.lines[0].get_xdata())
        axes.tick_params(axis="x", labelsize=7)
        axes.set_xlabel("GPUs T")
        axes.set_ylim(0)
        axes.legend(fontsize=7)
    panels[2].set_xlabel("GPUs of a group N")
    figure.suptitle("lines: modelled; grey: paper", fontsize=9)
    save(figure, "scaling_limits")


if __name__ == "__main__":
    main()
