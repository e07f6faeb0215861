"""NE, AUC and QPS of full model parallelism and 2D, and the NE gap between them, paired by seed.

NE and AUC are of held-out rows; ``progressive`` is of the training rows, each scored before the model trained on it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from scipy.stats import sem, t

from sparse2d.config import TrainConfig
from sparse2d.records import plain
from sparse2d.report.runs import flat, load_runs

# What distinguishes the rows of one comparison.
AXES = {
    "config.parallelism.kind": "parallelism",
    "config.parallelism.num_groups": "num_groups",
    "config.optimizer.name": "optimizer",
    "config.sync.combine": "combine",
    "config.optimizer.moment_scale": "moment_scale",
    "config.sync.interval": "sync_interval",
    "config.sync.moments": "sync_moments",
}
# What may differ between runs of one comparison beside the axes and the data's path; the rest must be equal.
FREE = (
    "config.experiment",
    "config.seed",
    # Asks for more scores of the same run.
    "config.frequency_bins",
    "config.eval_every",
    "config.fail_fast",
    "config.results_dir",
    "config.rerun",
    "config.tracking",
    "config.data.path",
    "config.data.out_dir",
)
VALUES = {
    "ne": "eval.ne",
    "auc": "eval.auc",
    "ne_gap_pct": "ne_gap_pct",
    "ne_gap_best_lr_pct": "ne_gap_best_lr_pct",
    "progressive_ne": "progressive.ne",
    "progressive_gap_pct": "progressive_gap_pct",
    "qps": "train.qps",
}
SETTING = ["data", "train_rows", "num_ranks", "global_batch_size", "settings"]
COMPARISON = [*SETTING, "table_lr"]


@dataclass(frozen=True)
class Study:
    """A table of the runs of one experiment.

    Attributes:
        name: of the experiment.
        caption: what is claimed of its runs.
        also: another experiment, whose runs under the same settings need not be run again.
    """

    name: str
    caption: str
    also: str | None = None

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs under ``results_dir``; runs whose other settings differ are never pooled.

        ``settings`` is a hash over everything that has no column of its own, so that it tells comparisons apart.
        ``ne_gap_pct`` is to full model parallelism with the same learning rate, ``ne_gap_best_lr_pct`` to it with its
        best one; ``_ci95`` is half the width of the 95 % confidence interval of a mean over seeds (Student's t).
        """
        runs = load_runs(results_dir, self.name)
        if runs.empty:
            return runs
        own = prepared(runs)
        runs = own
        if self.also is not None and not (others := load_runs(results_dir, self.also)).empty:
            others = prepared(others)
            same = pd.MultiIndex.from_frame(others[COMPARISON]).isin(pd.MultiIndex.from_frame(own[COMPARISON]))
            runs = distinct(pd.concat([own, others[same]], ignore_index=True))
        # Columns of one block: pandas warns of a frame of hundreds.
        runs = runs.copy()
        runs["ne_gap_pct"] = paired_gap(runs, COMPARISON)
        runs["ne_gap_best_lr_pct"] = paired_gap(runs, SETTING)
        runs["progressive_gap_pct"] = paired_gap(runs, COMPARISON, of="progressive.ne")
        return ordered(pd.DataFrame([*_constants(runs), *table_rows(runs, [], VALUES)]))


def distinct(runs: pd.DataFrame, more: Sequence[str] = ()) -> pd.DataFrame:
    """Of runs that differ in nothing but what is free the first: a seed counts once; ``more`` tell runs apart, too."""
    return runs.drop_duplicates([*COMPARISON, *AXES.values(), "config.seed", *more])


def ordered(table: pd.DataFrame, *more: str) -> pd.DataFrame:
    """One comparison after the other, the reference first; ``more`` are further columns to sort by."""
    order = {"constant": 0, "data_parallel": 1, "full_mp": 2, "sparse_2d": 3}
    table["order"] = table["parallelism"].map(order)
    keys = [*COMPARISON, "order", "num_groups", "combine", "moment_scale", "sync_interval", "sync_moments", *more]
    return table.sort_values(keys, ignore_index=True).drop(columns="order")


def prepared(runs: pd.DataFrame, more: Sequence[str] = ()) -> pd.DataFrame:
    """Distinct runs with the columns of ``COMPARISON`` and ``AXES``; ``more`` are columns that tell runs apart, too."""
    runs = runs.rename(columns={**AXES, "config.optimizer.lr": "table_lr"}).assign(
        label=runs["provenance"],
        data=runs["data.name"],
        train_rows=runs["train.rows"],
        num_ranks=runs["config.launch.num_ranks"],
        global_batch_size=runs["config.global_batch_size"],
    )
    runs["moment_scale"] = runs["moment_scale"].where(runs["moment_scale"] != "auto", runs["num_groups"]).astype(float)
    # An order of rows that follows the seed is paired by it; any other one is a setting.
    if "config.data.shuffle_seed" in runs:
        follows = runs["config.data.shuffle_seed"] == runs["config.seed"]
        runs["config.data.shuffle_seed"] = runs["config.data.shuffle_seed"].mask(follows, "seed")
    runs["settings"] = settings_hash(runs)
    # First those that were asked for more scores, of which some tables are made.
    asked = runs.get("config.frequency_bins", pd.Series(index=runs.index, dtype=object)).isna()
    return distinct(runs.loc[asked.sort_values(kind="stable").index], more)


def settings_hash(runs: pd.DataFrame) -> pd.Series:
    """Short hash of each run's config without axes and free options, of its testbed if it ran in one, and of its data.

    Options at their defaults say nothing: one that was added later does not set older runs apart.
    """
    defaults = dict(flat({"config": plain(TrainConfig())}))
    columns = [
        name for name in map(str, runs) if name.startswith(("config.", "testbed.config.")) and not name.startswith(FREE)
    ]
    # Rows rather than columns, and no nulls: the hash of a run must not depend on what other runs have.
    rows = [
        {str(name): value for name, value in row.dropna().items()}
        for _, row in runs[[*sorted(columns), "data.digest"]].iterrows()
    ]
    texts = [str({name: value for name, value in row.items() if defaults.get(name) != value}) for row in rows]
    return pd.Series([hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts], index=runs.index)


def paired_gap(runs: pd.DataFrame, shared: list[str], of: str = "eval.ne") -> pd.Series:
    """A score over that of full model parallelism with the same seed, optimizer and ``shared``, less one, in percent.

    Of several learning rates of full MP the one with the best mean score is taken, among those with most seeds. The
    reference's moment is not scaled: full MP has one group, for which c = M is 1.
    """
    runs = runs.assign(unscaled=runs["optimizer"].str.removeprefix("momentum_scaled_"), ne=runs[of].astype(float))
    is_reference = (runs["parallelism"] == "full_mp") & (runs["moment_scale"] == 1)
    setting = [*shared, "unscaled"]
    full_mp = runs[is_reference].copy()
    by_lr = full_mp.groupby([*setting, "table_lr"])
    full_mp = full_mp.assign(mean=by_lr["ne"].transform("mean"), seeds=by_lr["config.seed"].transform("nunique"))
    # A learning rate with fewer seeds would win or lose by them.
    full_mp = full_mp[full_mp["seeds"] == full_mp.groupby(setting)["seeds"].transform("max")]
    best = full_mp[full_mp["mean"] == full_mp.groupby(setting)["mean"].transform("min")]
    keys = [*setting, "config.seed"]
    reference = best.drop_duplicates(keys).set_index(keys)["ne"].reindex(pd.MultiIndex.from_frame(runs[keys]))
    gap: pd.Series = (runs["ne"] / reference.to_numpy() - 1) * 100
    return gap


def table_rows(runs: pd.DataFrame, more: list[str], values: dict[str, str]) -> list[dict[str, object]]:
    """A row for each distinct setting of the comparison, the axes and ``more`` columns.

    Args:
        runs: as ``prepared``.
        more: further columns that tell rows apart.
        values: column of the table and that of ``runs`` whose mean over seeds it is.
    """
    keys = [*COMPARISON, *AXES.values(), *more]
    groups = runs.groupby(keys, sort=True, dropna=False)
    return [_row(dict(zip(keys, key, strict=True)), group, values) for key, group in groups]


def _row(axes: dict[str, object], group: pd.DataFrame, values: dict[str, str]) -> dict[str, object]:
    row = {"label": group["label"].iloc[0], **axes}
    for name, column in values.items():
        scores = group[column].astype(float)
        row |= {name: scores.mean(), f"{name}_std": scores.std()}
        if "_gap_" in name:
            row[f"{name}_ci95"] = half_width(scores.dropna())
    return row | {"n_seeds": group["config.seed"].nunique(), "fingerprints": " ".join(sorted(group["fingerprint"]))}


def half_width(values: pd.Series) -> float | None:
    """Half the width of the 95 % confidence interval of the mean; None for fewer than two values."""
    return float(t.ppf(0.975, len(values) - 1) * sem(values)) if len(values) > 1 else None


def _constants(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A constant prediction at the evaluation rows' base rate, scored by the same code: NE 1, AUC 0.5."""
    rows = []
    for key, group in runs.groupby(COMPARISON):
        comparison = dict(zip(COMPARISON, key, strict=True))
        scores = {"ne": group["eval_constant.ne"].iloc[0], "auc": group["eval_constant.auc"].iloc[0], "n_seeds": 0}
        rows.append({"label": group["label"].iloc[0], **comparison, "parallelism": "constant", **scores})
    return rows
