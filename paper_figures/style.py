"""One look for all figures: readable in grey, vector PDF for papers and PNG for pages."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FIGURES = Path(__file__).parent
TABLES = FIGURES.parent / "results" / "tables"

# Told apart by shape and grey value as well as by hue (Okabe-Ito colours).
SERIES = [
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
]


def use_style() -> None:
    """Set matplotlib's defaults."""
    mpl.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "0.9",
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 200,
            # No dates, so that the same table gives the same file.
            "svg.hashsalt": "sparse2d",
        }
    )


def save(figure: Figure, name: str) -> None:
    """Write ``name.pdf`` and ``name.png`` beside the scripts."""
    figure.savefig(FIGURES / f"{name}.pdf", metadata={"CreationDate": None})
    figure.savefig(FIGURES / f"{name}.png", metadata={"Software": None})
    plt.close(figure)
    print(f"figure: paper_figures/{name}.pdf and .png")
