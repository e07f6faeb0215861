"""One look for all figures: readable in grey, vector PDF for papers and PNG for pages."""

from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

FIGURES = Path(__file__).parent
TABLES = FIGURES.parent / "results" / "tables"

Rows = TypeVar("Rows", bound=Sized)

# Told apart by shape and grey value as well as by hue (Okabe-Ito colours).
SERIES: list[dict[str, Any]] = [
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "v", "linestyle": "-"},
]
# Labels and looks of the rules that merge replicas.
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "mean_1": ("mean, c = 1", SERIES[0]),
    "mean_M": ("mean, c = M", SERIES[1]),
    "delta_sum": ("delta_sum", SERIES[2]),
    "touch_mean": ("touch_mean", SERIES[3]),
    "merged_gradient": ("merged_gradient", SERIES[4]),
}


class NoFigureError(Exception):
    """Why there is nothing to draw."""


class MissingTableError(NoFigureError):
    """The table has not been made."""


class BadTableError(NoFigureError):
    """The file is no table."""


def read(name: str) -> pd.DataFrame:
    """The table ``results/tables/<name>.csv``.

    Raises:
        MissingTableError: if it is not there.
        BadTableError: if it is empty or damaged.
    """
    path = TABLES / f"{name}.csv"
    try:
        return pd.read_csv(path)
    except FileNotFoundError as error:
        raise MissingTableError(f"it needs results/tables/{path.name}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise BadTableError(f"results/tables/{path.name} is no table ({str(error).strip()}); make it anew") from error


def needed(rows: Rows, what: str) -> Rows:
    """Rows, or panels, that a figure cannot do without.

    Raises:
        NoFigureError: if there are none.
    """
    if len(rows) == 0:
        raise NoFigureError(f"its table has no {what}")
    return rows


def rule_of(rows: pd.DataFrame) -> pd.Series:
    """The key in ``RULES`` of each row of a table of NE gaps."""

    def rule(row: pd.Series) -> str:
        if row["parallelism"] != "sparse_2d":
            return str(row["parallelism"])
        if row["combine"] != "mean":
            return str(row["combine"])
        return {1.0: "mean_1", row["num_groups"]: "mean_M"}.get(row["moment_scale"], f"mean_{row['moment_scale']:g}")

    return rows.apply(rule, axis=1)


def use_style() -> None:
    """Set matplotlib's defaults."""
    mpl.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.ymargin": 0.08,
            "grid.color": "0.9",
            # Text in a PDF stays text.
            "pdf.fonttype": 42,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 200,
            # No dates, so that the same table gives the same file.
            "svg.hashsalt": "sparse2d",
        }
    )


def powers_of_two(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic x-axis with a tick at each value, written as a plain number."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def seeds_of(rows: pd.DataFrame) -> str:
    """How many seeds the rows of a table have: ``5 seeds``, or the least and the most."""
    least, most = int(rows["n_seeds"].min()), int(rows["n_seeds"].max())
    return f"{least if least == most else f'{least} to {most}'} seed{'s' if most > 1 else ''}"


def common_legend(figure: Figure, panels: Iterable[Axes], columns: int) -> None:
    """One legend below all panels, of what any of them has."""
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def name_points(axes: Axes, x: Iterable[float], y: Iterable[float], names: Iterable[str], side: str) -> None:
    """Names beside points: ``left`` above and ``below`` right keep clear of a rising line; ``right``, ``under``."""
    place, align = {
        "left": ((-5, 4), "right"),
        "below": ((5, -9), "left"),
        "right": ((5, 3), "left"),
        "under": ((0, -11), "center"),
    }[side]
    for name, point in zip(names, zip(x, y, strict=True), strict=True):
        axes.annotate(name, point, place, textcoords="offset points", fontsize=7, ha=align)


def pictures(name: str) -> tuple[Path, Path]:
    """The files of a figure, for papers and for pages."""
    return FIGURES / f"{name}.pdf", FIGURES / f"{name}.png"


def save(figure: Figure, name: str) -> None:
    """Write ``name.pdf`` and ``name.png`` beside the scripts."""
    pdf, png = pictures(name)
    figure.savefig(pdf, metadata={"CreationDate": None})
    figure.savefig(png, metadata={"Software": None})
    plt.close(figure)
    print(f"figure: paper_figures/{name}.pdf and .png")
