"""Steps on shaped links as the cost model predicts them, against what they took."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter
from style import SERIES, needed, read, save, use_style


def main() -> None:
    """Draw ``results/tables/shaped_validation.csv``."""
    table = needed(read("shaped_validation"), "layout")
    use_style()
    figure, axes = plt.subplots(figsize=(4.6, 4.2))
    low, high = table["step_ms"].min() / 1.4, table["step_ms"].max() * 1.4
    line = np.array([low, high])
    axes.fill_between(line, 0.8 * line, 1.2 * line, color="0.92", label="within 20 %")
    axes.plot(line, line, color="0.6", linewidth=0.8)
    for (sharding, rows), style in zip(table.groupby("sharding"), SERIES, strict=False):
        look = style | {"linestyle": ""}
        name = str(sharding).replace("_", "-")
        fitted, predicted = rows[rows["role"] == "fit"], rows[rows["role"] == "prediction"]
        axes.errorbar(
            predicted["step_ms"],
            predicted["step_ms_modelled"],
            xerr=predicted["step_ms_std"].fillna(0),
            ms=5,
            elinewidth=0.8,
            label=f"{name}: predicted",
            **look,
        )
        axes.plot(
            fitted["step_ms"], fitted["step_ms_modelled"], mfc="none", ms=8, label=f"{name}: full MP, fitted", **look
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([factor * 10**power for power in range(5) for factor in (1, 2, 3, 5)]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step on shaped links (ms, mean; bars: spread of repetitions)")
    axes.set_ylabel("modelled step (ms)")
    axes.legend(fontsize=7, loc="upper left")
    save(figure, "shaped_validation")


if __name__ == "__main__":
    main()
