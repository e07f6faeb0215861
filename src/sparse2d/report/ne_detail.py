"""Where NE is lost: by how often training saw a row's rarest id, and along the pass over the samples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparse2d.metrics import normalized_entropy
from sparse2d.report.ne_gap import COMPARISON, ordered, paired_gap, prepared, table_rows
from sparse2d.report.runs import load_runs, progressive_losses

# Points of a curve, each over as many samples.
CURVE_POINTS = 7


@dataclass(frozen=True)
class Detail:
    """A table of the runs of one experiment, each run cut into parts that are compared part by part.

    Attributes:
        name: of the table.
        experiment: whose runs it is of.
        caption: what it shows.
        parts: the scores of one run, ``eval.ne`` in each row.
        columns: of ``parts`` that tell them apart.
    """

    name: str
    experiment: str
    caption: str
    parts: Callable[[pd.Series], pd.DataFrame]
    columns: list[str]

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs that have parts; ``ne_gap_pct`` is to full MP with the same seed, lr and part."""
        runs = load_runs(results_dir, self.experiment)
        if runs.empty:
            return runs
        runs = prepared(runs)
        parts = [self.parts(run).assign(fingerprint=run["fingerprint"]) for _, run in runs.iterrows()]
        cut = pd.concat(parts).dropna(subset="eval.ne")
        if cut.empty:
            return cut
        runs = runs.drop(columns="eval.ne").merge(cut, on="fingerprint").copy()
        runs["ne_gap_pct"] = paired_gap(runs, [*COMPARISON, *self.columns])
        values = {"ne": "eval.ne", "ne_gap_pct": "ne_gap_pct", "rows": "part_rows"}
        table = pd.DataFrame(table_rows(runs, self.columns, values)).drop(columns="rows_std")
        return ordered(table, *self.columns)


def by_count(run: pd.Series) -> pd.DataFrame:
    """Scores of evaluation rows by how often training saw their rarest id."""
    bins = run.get("eval_by_count")
    if not isinstance(bins, list):
        return pd.DataFrame(columns=["seen_from", "eval.ne", "part_rows"])
    return pd.DataFrame(bins).rename(columns={"ne": "eval.ne", "rows": "part_rows"})


def along_the_pass(run: pd.Series) -> pd.DataFrame:
    """Progressive NE of equal parts of the pass: every row is scored before the model trains on it."""
    windows = progressive_losses(Path(run["folder"]))
    if windows.empty:
        return pd.DataFrame(columns=["samples", "eval.ne", "part_rows"])
    size = windows["rows"].iloc[-1] / CURVE_POINTS
    # A window belongs where its middle is.
    part = ((windows["rows"] - windows["new_rows"] / 2) // size).astype(int)
    sums = windows.assign(loss=windows["loss"] * windows["new_rows"]).groupby(part)
    means = sums["loss"].sum() / sums["new_rows"].sum()
    return pd.DataFrame(
        {
            "samples": sums["rows"].max(),
            "eval.ne": [normalized_entropy(loss, run["data.base_rate"]) for loss in means],
            "part_rows": sums["new_rows"].sum(),
        }
    )
