"""NE, AUC and QPS of full model parallelism and 2D, and the NE gap between them, paired by seed."""

import hashlib
from pathlib import Path

import pandas as pd

from sparse2d.report.runs import load_runs

NAME = "ne_parity"
CAPTION = "paper (arXiv 2508.03854): no NE loss against full MP with c = M, a loss with c = 1"

# What distinguishes the rows of one comparison.
AXES = {
    "config.parallelism.kind": "parallelism",
    "config.parallelism.num_groups": "num_groups",
    "config.optimizer.name": "optimizer",
    "config.optimizer.moment_scale": "moment_scale",
    "config.sync.interval": "sync_interval",
}
# What may differ between runs of one comparison beside the axes and the data's path; the rest must be equal.
FREE = (
    "config.seed",
    "config.results_dir",
    "config.rerun",
    "config.tracking",
    "config.data.path",
    "config.data.out_dir",
)
VALUES = {"ne": "eval.ne", "auc": "eval.auc", "ne_gap_pct": "ne_gap_pct", "qps": "train.qps"}
COMPARISON = ["data", "train_rows", "num_ranks", "global_batch_size", "table_lr", "settings"]


def build(results_dir: Path) -> pd.DataFrame:
    """The table of the runs under ``results_dir``; runs whose other settings differ are never pooled.

    ``settings`` is a hash over everything that has no column of its own, so that it tells comparisons apart.
    """
    runs = load_runs(results_dir, NAME)
    if runs.empty:
        return runs
    runs = runs.rename(columns=AXES).assign(
        label=runs["provenance"],
        data=runs["data.name"],
        train_rows=runs["train.rows"],
        num_ranks=runs["config.launch.num_ranks"],
        global_batch_size=runs["config.global_batch_size"],
        table_lr=runs["config.optimizer.lr"],
        combine="mean",
    )
    runs["moment_scale"] = runs["moment_scale"].where(runs["moment_scale"] != "auto", runs["num_groups"]).astype(float)
    runs["settings"] = _settings(runs)
    runs["ne_gap_pct"] = _paired_gap(runs)
    rows = [
        _row(dict(zip([*COMPARISON, *AXES.values()], key, strict=True)), group)
        for key, group in runs.groupby([*COMPARISON, *AXES.values()], sort=True)
    ]
    table = pd.DataFrame([*_constants(runs), *rows])
    order = {"constant": 0, "data_parallel": 1, "full_mp": 2, "sparse_2d": 3}
    table["order"] = table["parallelism"].map(order)
    keys = [*COMPARISON, "order", "num_groups", "moment_scale", "sync_interval"]
    return table.sort_values(keys, ignore_index=True).drop(columns="order")


def _settings(runs: pd.DataFrame) -> pd.Series:
    """Short hash of each run's config without axes, free options and nulls, and of its data."""
    columns = [name for name in map(str, runs) if name.startswith("config.") and not name.startswith(FREE)]
    # Rows rather than columns, and no nulls: the hash of a run must not depend on what other runs have.
    texts = [str(row.dropna().to_dict()) for _, row in runs[[*sorted(columns), "data.digest"]].iterrows()]
    return pd.Series([hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts], index=runs.index)


def _paired_gap(runs: pd.DataFrame) -> pd.Series:
    """NE over that of full model parallelism with the same seed, data, optimizer and settings, minus one, in percent.

    The reference's moment is not scaled: full MP has one group, for which c = M is 1.
    """
    keys = [*COMPARISON, "config.seed", "unscaled"]
    runs = runs.assign(unscaled=runs["optimizer"].str.removeprefix("momentum_scaled_"))
    is_reference = (runs["parallelism"] == "full_mp") & (runs["moment_scale"] == 1)
    full_mp = runs[is_reference].drop_duplicates(keys).set_index(keys)["eval.ne"]
    reference = full_mp.reindex(pd.MultiIndex.from_frame(runs[keys])).to_numpy()
    gap: pd.Series = (runs["eval.ne"].astype(float) / reference - 1) * 100
    return gap


def _row(axes: dict[str, object], group: pd.DataFrame) -> dict[str, object]:
    row = {"label": group["label"].iloc[0], **axes, "combine": "mean"}
    for name, column in VALUES.items():
        values = group[column].astype(float)
        row |= {name: values.mean(), f"{name}_std": values.std()}
    return row | {"n_seeds": group["config.seed"].nunique(), "fingerprints": " ".join(sorted(group["fingerprint"]))}


def _constants(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A constant prediction at the evaluation rows' base rate, scored by the same code: NE 1, AUC 0.5."""
    rows = []
    for key, group in runs.groupby(COMPARISON):
        comparison = dict(zip(COMPARISON, key, strict=True))
        scores = {"ne": group["eval_constant.ne"].iloc[0], "auc": group["eval_constant.auc"].iloc[0], "n_seeds": 0}
        rows.append({"label": group["label"].iloc[0], **comparison, "parallelism": "constant", **scores})
    return rows
