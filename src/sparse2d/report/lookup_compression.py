"""What compressed lookups save in bytes and cost in NE, against the same runs without compression, paired by seed."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparse2d.report.dense_compression import blank_unread, to_uncompressed
from sparse2d.report.ne_gap import COMPARISON, prepared, table_rows
from sparse2d.report.runs import load_runs

# Columns that tell the rows of one comparison apart.
OPTIONS = ("density", "lifetime", "value_dtype", "warmup_steps")
# Of lookups, what is embeddings: ids are sent as they are.
EMBEDDINGS = ("sizes", "embeddings", "gradients")
VALUES = {
    "ne": "eval.ne",
    "auc": "eval.auc",
    "ne_gap_pct": "ne_gap_pct",
    "auc_gap_pct": "auc_gap_pct",
    "bytes_ratio": "bytes_ratio",
    "bytes_per_step": "bytes_per_step",
    "forward_bytes_per_step": "forward_bytes_per_step",
    "backward_bytes_per_step": "backward_bytes_per_step",
    "sent_share": "sent_share",
    "compress_ms": "compress_ms",
}


@dataclass(frozen=True)
class LookupStudy:
    """A table of the runs of one experiment over ``compression.lookup``; ``caption`` says what is claimed of them."""

    name: str
    caption: str

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs under ``results_dir``, a row for each setting of the options.

        ``bytes_ratio`` is what the runs without compression send over what these send: pooled embeddings, their
        gradients and how many there are, over the whole run, warm-up included, mean over the ranks. ``ne_gap_pct``
        is to the run without compression of the same seed.
        """
        runs = load_runs(results_dir, self.name)
        if runs.empty:
            return runs
        options = {f"config.compression.lookup.{name}": name for name in ["method", *OPTIONS]}
        runs = prepared(runs.rename(columns=options), list(options.values())).assign(
            dim=runs["config.model.embedding_dim"]
        )
        blank_unread(runs, OPTIONS)
        for name, parts in {
            "bytes": EMBEDDINGS,
            "forward_bytes": EMBEDDINGS[:2],
            "backward_bytes": EMBEDDINGS[2:],
        }.items():
            runs[f"{name}_per_step"] = _sent(runs, parts)
        for name, recorded in {"sent_share": "sent_share", "compress_ms": "compress_ms_p50"}.items():
            column = f"comms.compression.lookup.{recorded}.mean"
            runs[name] = runs[column] if column in runs else float("nan")
        runs["bytes_ratio"] = 1 / to_uncompressed(runs, "bytes_per_step")
        for name, column in {"ne": "eval.ne", "auc": "eval.auc"}.items():
            runs[f"{name}_gap_pct"] = (to_uncompressed(runs, column) - 1) * 100
        table = pd.DataFrame(table_rows(runs, ["dim", "method", *OPTIONS], VALUES))
        return table.sort_values([*COMPARISON, "dim", "method", "density"], ignore_index=True)


def _sent(runs: pd.DataFrame, parts: tuple[str, ...]) -> pd.Series:
    columns = [f"comms.lookup_parts_bytes_per_step.{part}.mean" for part in parts]
    return runs[columns].astype(float).sum(axis=1)
