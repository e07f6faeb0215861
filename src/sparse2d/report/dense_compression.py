"""What compression of dense gradients, or of both kinds of traffic, saves in bytes and time and costs in NE."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from sparse2d.report.ne_gap import AXES, COMPARISON, prepared, table_rows
from sparse2d.report.runs import load_runs

# Columns that tell the rows of one comparison apart, by option below config.compression.
DENSE = {
    f"dense.{name}": name for name in ("method", "density", "lifetime", "value_dtype", "scope", "warmup_steps", "rank")
}
BOTH = DENSE | {
    f"lookup.{name}": f"lookup_{name}" for name in ("method", "density", "lifetime", "value_dtype", "warmup_steps")
}
# Which methods read an option: for others it has its default, which says nothing of them.
READ_BY = {
    "density": ("dct", "topk"),
    "lifetime": ("dct",),
    "value_dtype": ("dct", "topk"),
    "scope": ("dct", "topk"),
    "warmup_steps": ("dct", "topk", "powersgd"),
    "rank": ("powersgd",),
}
RATIOS = {
    "bytes_ratio": "comms.dense_bytes_per_step.mean",
    "steady_bytes_ratio": "steady_bytes",
    "lookup_bytes_ratio": "comms.lookup_bytes_per_step.mean",
}
GAPS = {"ne_gap_pct": "eval.ne", "auc_gap_pct": "eval.auc", "progressive_gap_pct": "progressive.ne"}
VALUES = {
    "ne": "eval.ne",
    "auc": "eval.auc",
    **{name: name for name in (*GAPS, *RATIOS)},
    "bytes_per_step": "comms.dense_bytes_per_step.mean",
    "sent_share": "comms.compression.dense.sent_share.mean",
    "compress_ms": "comms.compression.dense.compress_ms_mean.mean",
    "compress_ms_p50": "comms.compression.dense.compress_ms_p50.mean",
    "qps": "train.qps",
    "qps_ratio": "qps_ratio",
}


@dataclass(frozen=True)
class CompressionStudy:
    """A table of runs over ``compression``.

    Attributes:
        name: of the table.
        caption: what is claimed of the runs.
        experiments: whose runs it is of.
        options: below ``config.compression``, and the columns they get; others set runs apart without a column.
        where: a pandas query that keeps some rows.
    """

    name: str
    caption: str
    experiments: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=lambda: DENSE)
    where: str | None = None

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs under ``results_dir``, a row for each setting of the options.

        ``bytes_ratio`` is what the runs without compression send for dense gradients over what these send, the mean
        over ranks and steps, warm-up included; ``steady_bytes_ratio`` the same of the step in the middle. Ratios and
        gaps are to the run without compression of the same seed.
        """
        runs = pd.concat([load_runs(results_dir, name) for name in self.experiments], ignore_index=True)
        if runs.empty:
            return runs
        runs["config.experiment"] = self.name
        renamed = {f"config.compression.{option}": column for option, column in self.options.items()}
        runs = prepared(runs.rename(columns=renamed), list(self.options.values()))
        for column in VALUES.values():
            if column not in runs and "." in column:
                runs[column] = float("nan")
        columns = [*self.options.values()]
        blank_unread(runs, columns)
        # Without compression all steps are alike, and only the first ones are counted.
        per_step = runs["comms.dense_bytes_per_step.mean"]
        runs["steady_bytes"] = runs["comms.dense_bytes_p50.mean"].where(runs["method"] != "none", per_step)
        for name, column in RATIOS.items():
            runs[name] = 1 / to_uncompressed(runs, column)
        for name, column in GAPS.items():
            runs[name] = (to_uncompressed(runs, column) - 1) * 100
        runs["qps_ratio"] = to_uncompressed(runs, "train.qps")
        table = pd.DataFrame(table_rows(runs, columns, VALUES))
        table = table.sort_values([*COMPARISON, "parallelism", "num_groups", *columns], ignore_index=True)
        return table if self.where is None else table.query(self.where).reset_index(drop=True)


def blank_unread(runs: pd.DataFrame, options: Iterable[str]) -> None:
    """Blank, in place, columns of options where the run's ``method``, or ``lookup_method``, does not read them."""
    for name in options:
        prefix = "lookup_" if name.startswith("lookup_") else ""
        if (option := name.removeprefix(prefix)) in READ_BY:
            runs[name] = runs[name].where(runs[f"{prefix}method"].isin(READ_BY[option]))


def to_uncompressed(runs: pd.DataFrame, column: str) -> pd.Series:
    """A column over its value in the run without compression of the same setting and seed."""
    keys = [*COMPARISON, *AXES.values(), "config.seed"]
    is_plain = (runs["method"] == "none") & (runs.get("lookup_method", "none") == "none")
    plain = runs[is_plain].drop_duplicates(keys).set_index(keys)[column].astype(float)
    ratio: pd.Series = runs[column].astype(float) / plain.reindex(pd.MultiIndex.from_frame(runs[keys])).to_numpy()
    return ratio
