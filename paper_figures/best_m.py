"""Which M is fastest on T GPUs, and what that hangs on: the cost model's answer for the ExFM-like workload."""

from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from style import SERIES, needed, powers_of_two, read, save, use_style

# The input that would leave the others no width.
WIDE = "dense_efficiency"


def draw_groups(axes: Axes) -> None:
    """QPS for each GPU over M, a line for each T; what does not fit is absent."""
    table = read("best_m")
    rows = needed(table[(table["label"] == "modelled") & table["qps"].notna()], "modelled row that fits")
    for (num_gpus, of_size), style in zip(rows.groupby("num_gpus"), cycle(SERIES), strict=False):
        of_size = of_size.sort_values("num_groups")
        axes.plot(of_size["num_groups"], of_size["scaling_factor_pct"], **style, label=f"T = {num_gpus}")
    powers_of_two(axes, table["num_groups"])
    axes.set_xlabel("number of groups M (absent: out of memory)")
    axes.set_ylabel("QPS for each GPU, % of 256 GPUs\n(modelled)")
    axes.legend(fontsize=8)


def draw_tornado(axes: Axes) -> None:
    """QPS of the best M with each input at its low and its high end, over that of the assumed inputs."""
    bars = read("recommend_exfm_like_tornado")
    best = read("recommend_exfm_like")
    fitting = needed(best[(best["sync_interval"] == 1) & best["qps"].notna()], "layout with K = 1 that fits")
    winner = fitting.sort_values("qps").iloc[-1]
    base, usual = winner["qps"], winner["num_groups"]
    is_wide = bars["input"] == WIDE
    wide, bars = needed(bars[is_wide], f"row of {WIDE}").iloc[0], bars[~is_wide].iloc[::-1]
    for side, color in (("low", "#D55E00"), ("high", "#0072B2")):
        change = 100 * (bars[f"qps_{side}"] / base - 1)
        axes.barh(bars["input"], change, color=color, label=f"input at its {side} end", height=0.6)
        for place, (value, groups) in enumerate(zip(change, bars[f"num_groups_{side}"], strict=True)):
            if pd.isna(value):
                axes.annotate("nothing fits at its low end", (0, place), fontsize=7, va="center")
            elif groups != usual:
                side_of_bar = "left" if value >= 0 else "right"
                axes.annotate(f" M={groups:.0f} ", (value, place), fontsize=7, ha=side_of_bar, va="center")
    axes.margins(x=0.2)
    off_scale = ", ".join(
        f"{100 * (wide[f'qps_{side}'] / base - 1):+.0f} % (M={wide[f'num_groups_{side}']:.0f}) at {wide[side]:g}"
        for side in ("low", "high")
    )
    axes.set_xlabel(
        "QPS of the best M, change in % (modelled, 1024 GPUs)\nM is written where it is not the usual one\n"
        f"off this scale, {WIDE}: {off_scale}",
        fontsize=7,
    )
    axes.legend(fontsize=7, loc="lower right")
    axes.tick_params(axis="y", labelsize=7)


def main() -> None:
    """Draw ``results/tables/best_m.csv`` and the recommendation's tornado."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0))
    draw_groups(left)
    draw_tornado(right)
    save(figure, "best_m")


if __name__ == "__main__":
    main()
