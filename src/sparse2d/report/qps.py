"""QPS of layouts beside full model parallelism, with the phases of a step and the bytes on each kind of link."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparse2d.report.ne_gap import settings_hash
from sparse2d.report.runs import load_runs

# What the rows of a table share, and what tells them apart; hosts and their links are null outside of the testbed.
COMPARISON = {
    "testbed.config.hosts": "hosts",
    "testbed.config.ranks_per_host": "ranks_per_host",
    "testbed.config.inter_host_mbit": "inter_host_mbit",
    "config.launch.num_ranks": "num_ranks",
    "config.global_batch_size": "global_batch_size",
    "config.parallelism.sharding": "sharding",
}
SHARED = ["label", *COMPARISON.values(), "settings"]
AXES = {
    "config.parallelism.kind": "parallelism",
    "config.parallelism.num_groups": "num_groups",
    "config.parallelism.replicas": "replicas",
    "config.sync.rows": "sync_rows",
    "config.sync.interval": "sync_interval",
}
# Means over the repetitions; missing where a run did not measure them.
VALUES = {
    "threads_per_rank": "train.threads_per_rank",
    "step_ms": "train.step_ms.p50",
    "lookup_bytes": "comms.lookup_bytes_per_step.mean",
    "dense_bytes": "comms.dense_bytes_per_step.mean",
    "averaging_bytes": "averaging_bytes",
    "inside_host_bytes": "comms.link_bytes_per_step.inside_host.mean",
    "between_hosts_bytes": "comms.link_bytes_per_step.between_hosts.mean",
    "peak_memory_bytes": "memory.peak_rss_bytes",
    "table_bytes": "table_bytes",
    "imbalance": "plan.imbalance",
}
PHASES = "train.phases_ms."


@dataclass(frozen=True)
class QpsStudy:
    """A table of the runs of one experiment; ``caption`` says what is claimed of them."""

    name: str
    caption: str

    def build(self, results_dir: Path) -> pd.DataFrame:
        """The table of the runs under ``results_dir``; a repetition is a seed.

        ``ratio_to_full_mp`` is paired by repetition. Bytes are per step: sent by a rank (``lookup_bytes``,
        ``averaging_bytes``, ``dense_bytes``) or by a host on a kind of link (``inside_host_bytes``, headers included).
        Phases are milliseconds a step, mean over steps, ranks and repetitions. Runs whose other settings differ are
        never pooled: ``settings`` is a hash over them.
        """
        runs = load_runs(results_dir, self.name)
        if runs.empty:
            return runs
        runs = _prepared(runs)
        keys = [*SHARED, *AXES.values()]
        full_mp = runs[runs["parallelism"] == "full_mp"].set_index([*SHARED, "config.seed"])["qps"]
        reference = full_mp.reindex(pd.MultiIndex.from_frame(runs[[*SHARED, "config.seed"]]))
        runs["ratio_to_full_mp"] = runs["qps"] / reference.to_numpy()
        rows = [
            dict(zip(keys, key, strict=True)) | _values(group)
            for key, group in runs.groupby(keys, sort=True, dropna=False)
        ]
        return pd.DataFrame(rows)


def _prepared(runs: pd.DataFrame) -> pd.DataFrame:
    runs = runs.reindex(columns=[*runs, *(name for name in [*COMPARISON, *VALUES.values()] if name not in runs)])
    runs = runs.rename(columns=COMPARISON | AXES | {"provenance": "label"})
    runs["sharding"] = ["+".join(kinds) for kinds in runs["sharding"]]
    # Options without effect where nothing is averaged.
    runs.loc[runs["parallelism"] != "sparse_2d", ["replicas", "sync_rows", "sync_interval"]] = None
    runs["qps"] = runs["train.qps"].astype(float)
    runs["averaging_bytes"] = runs["comms.sync_bytes_per_sync.mean"] / runs["sync_interval"].fillna(1)
    runs["table_bytes"] = [max(of_ranks) for of_ranks in runs["plan.bytes_per_rank"]]
    runs["settings"] = settings_hash(runs)
    return runs


def _values(group: pd.DataFrame) -> dict[str, object]:
    """One row's figures over its repetitions, and the fingerprints behind them."""
    figures: dict[str, object] = {"group_size": group["num_ranks"].iloc[0] // group["num_groups"].iloc[0]}
    for name in ("qps", "ratio_to_full_mp"):
        values = group[name].astype(float)
        spread = {"": values.mean(), "_std": values.std(), "_min": values.min(), "_max": values.max()}
        figures |= {f"{name}{suffix}": value for suffix, value in spread.items()}
    figures |= {name: group[column].astype(float).mean() for name, column in VALUES.items()}
    for column in (name for name in map(str, group) if name.startswith(PHASES) and name.endswith(".per_rank")):
        means = [rank["mean"] for ranks in group[column].dropna() for rank in ranks]
        phase = column.removeprefix(PHASES).removesuffix(".per_rank")
        figures[f"{phase}_ms"] = sum(means) / len(means) if means else None
    return figures | {
        "n_seeds": group["config.seed"].nunique(),
        "fingerprints": " ".join(sorted(group["fingerprint"])),
    }
