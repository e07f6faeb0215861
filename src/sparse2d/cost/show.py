"""Predictions on the terminal; every table says that it is modelled."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from sparse2d.cost.config import SimulateConfig
from sparse2d.cost.model import GB, Prediction, predict

WIDTH = 118
LABEL = "modelled"


def show_point(config: SimulateConfig) -> None:
    """Print the prediction for one layout."""
    prediction = predict(config)
    console = Console(width=WIDTH)
    mesh = prediction.mesh
    console.print(
        f"[bold]{LABEL}[/bold]: {config.workload.name} on {mesh.world_size} x {config.hardware.name}, M = "
        f"{mesh.num_groups} groups of N = {mesh.group_size}, averaged every {config.sync.interval} steps",
        highlight=False,
    )
    console.print(_time_table(prediction))
    console.print(_memory_table(prediction))
    imbalance = ", ".join(f"{name} {value:.2f}" for name, value in prediction.imbalance.items())
    condition = " if it had the memory" if prediction.oom else ""
    console.print(
        f"{LABEL}: {prediction.qps:.4g} QPS{condition}; imbalance (max / mean over ranks): {imbalance}", highlight=False
    )
    sent = prediction.sent
    console.print(
        f"{LABEL}: a GPU sends at most {sent.lookup.max() / GB:.3g} GB a step for lookups, {sent.dense / GB:.3g} GB "
        f"for dense gradients, {sent.averaging.max() / GB:.3g} GB in an averaging",
        highlight=False,
    )
    console.print(f"{LABEL}: {verdict(prediction)}", highlight=False)


def verdict(prediction: Prediction) -> str:
    """Whether it fits, with the numbers."""
    peak, usable, all_of_it = (
        value / GB for value in (prediction.memory.total, prediction.usable, prediction.capacity)
    )
    fits = "OUT OF MEMORY" if prediction.oom else "fits"
    return (
        f"{fits}: peak {peak:.1f} GB of {usable:.1f} GB usable ({prediction.peak_memory_pct:.1f} % of {all_of_it:g} GB)"
    )


def _time_table(prediction: Prediction) -> Table:
    step = asdict(prediction.step)
    rows = [[name, f"{1e3 * value:.2f}", f"{100 * value / prediction.step.total:.1f}"] for name, value in step.items()]
    rows.append(["step", f"{1e3 * prediction.step.total:.2f}", "100.0"])
    rows.append(["hidden communication", f"{1e3 * prediction.hidden:.2f}", ""])
    return text_table(f"where a step goes ({LABEL})", ["phase", "ms", "%"], rows)


def _memory_table(prediction: Prediction) -> Table:
    parts = asdict(prediction.memory) | {"peak": prediction.memory.total}
    rows = [[name, f"{value / GB:.3g}", f"{100 * value / prediction.capacity:.1f}"] for name, value in parts.items()]
    return text_table(f"memory of the fullest rank ({LABEL})", ["part", "GB", "% of memory"], rows)


def text_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """A rich table whose first column is text and whose others are numbers."""
    table = Table(title=title, caption=caption)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
