"""What compressed dense gradients save in bytes and time, and cost in NE, against the same runs without compression."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparse2d.report.ne_gap import AXES, COMPARISON, prepared, table_rows
from sparse2d.report.runs import load_runs

# Columns that tell the rows of one comparison apart, and which methods read them.
OPTIONS = {
    "density": ("dct", "topk"),
    "lifetime": ("dct",),
    "value_dtype": ("dct", "topk"),
    "scope": ("dct", "topk"),
    "warmup_steps": ("dct", "topk", "powersgd"),
    "rank": ("powersgd",),
}
VALUES = {
    "ne": "eval.ne",
    "auc": "eval.auc",
    "ne_gap_pct": "ne_gap_pct",
    "auc_gap_pct": "auc_gap_pct",
    "progressive_gap_pct": "progressive_gap_pct",
    "bytes_ratio": "bytes_ratio",
    "steady_bytes_ratio": "steady_bytes_ratio",
    "bytes_per_step": "comms.dense_bytes_per_step.mean",
    "sent_share": "sent_share",
    "compress_ms": "compress_ms",
    "qps": "train.qps",
}


@dataclass(frozen=True)
class DenseStudy:
    """A table of the runs of one experiment over ``compression.dense``; ``caption`` says what is claimed of them."""

    name: str
    caption: str

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs under ``results_dir``, a row for each setting of the options.

        ``bytes_ratio`` is what the runs without compression send for dense gradients over what these send, the mean
        over ranks and steps, warm-up included; ``steady_bytes_ratio`` the same of the step in the middle. Gaps are to
        the run without compression of the same seed.
        """
        runs = load_runs(results_dir, self.name)
        if runs.empty:
            return runs
        runs = prepared(
            runs.rename(columns={f"config.compression.dense.{name}": name for name in ["method", *OPTIONS]})
        )
        for name, methods in OPTIONS.items():
            # What a method does not read has its default, which says nothing of it.
            runs[name] = runs[name].where(runs["method"].isin(methods))
        for name in ("sent_share", "compress_ms_mean"):
            recorded = f"comms.compression.dense.{name}.mean"
            runs[name.removesuffix("_mean")] = runs[recorded] if recorded in runs else float("nan")
        runs["bytes_ratio"] = 1 / to_uncompressed(runs, "comms.dense_bytes_per_step.mean")
        runs["steady_bytes_ratio"] = 1 / to_uncompressed(runs, "comms.dense_bytes_p50.mean")
        for name, column in {"ne": "eval.ne", "auc": "eval.auc", "progressive": "progressive.ne"}.items():
            runs[f"{name}_gap_pct"] = (to_uncompressed(runs, column) - 1) * 100
        table = pd.DataFrame(table_rows(runs, ["method", *OPTIONS], VALUES))
        keys = [*COMPARISON, "parallelism", "num_groups", "method", "warmup_steps", "density", "lifetime"]
        return table.sort_values(keys, ignore_index=True)


def to_uncompressed(runs: pd.DataFrame, column: str) -> pd.Series:
    """A column over its value in the run without compression of the same setting and seed."""
    keys = [*COMPARISON, *AXES.values(), "config.seed"]
    plain = runs[runs["method"] == "none"].drop_duplicates(keys).set_index(keys)[column].astype(float)
    ratio: pd.Series = runs[column].astype(float) / plain.reindex(pd.MultiIndex.from_frame(runs[keys])).to_numpy()
    return ratio
