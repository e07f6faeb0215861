"""``python -m sparse2d.report``: tables from results/runs, and the report of all tables and figures."""

import logging
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from sparse2d.cli import run_entry_point
from sparse2d.config import ReportConfig
from sparse2d.errors import UserError
from sparse2d.records import write_atomically
from sparse2d.report.claims import claims_file, read_claims
from sparse2d.report.dense_compression import BOTH, CompressionStudy
from sparse2d.report.lookup_compression import LookupStudy
from sparse2d.report.ne_detail import Detail, along_the_pass, by_count
from sparse2d.report.ne_gap import COMPARISON, Study
from sparse2d.report.page import write_report
from sparse2d.report.qps import SHARED, QpsStudy
from sparse2d.report.views import write_views

log = logging.getLogger("sparse2d.report")

STUDIES = [
    Study(
        "ne_parity", "paper (arXiv 2508.03854): no NE loss against full MP with c = M, a loss with c = 1", "ne_rules"
    ),
    Study(
        "ne_rules",
        "gaps to full MP of the paper's rule (mean, c = 1 and c = M) and of delta_sum, touch_mean and merged_gradient",
    ),
    Study("moment_scale", "is c more than a learning rate? compare each c at its best lr"),
    Study("sync_interval", "NE gap against K, steps between averagings, by rule and by what becomes of the moments"),
    Study("large_m", "NE gap at 16, 32 and 64 groups"),
    Study("batch_size", "NE gap against the global batch size"),
    Study("optimizers", "NE gap of 2D under each table optimizer"),
]
DETAILS = [
    Detail(
        "row_frequency",
        "ne_rules",
        "NE gap by how often training saw the rarest id of an evaluation row",
        by_count,
        ["seen_from"],
    ),
    Detail("ne_curves", "ne_rules", "progressive NE along the pass over the samples", along_the_pass, ["samples"]),
]
QPS = [
    QpsStudy("qps_scaling", "QPS under weak scaling: mean, least and most of the repetitions, ratio within each"),
    QpsStudy("placement", "replicas inside a host or across hosts, all rows or touched rows"),
    QpsStudy("sync_interval_qps", "QPS against K, steps between averagings"),
    QpsStudy("group_size", "QPS against N, ranks that share one copy of the tables"),
]
COMPRESSION = [
    CompressionStudy(
        "dct_dp",
        "dense gradients by DCT-DP and others (paper, arXiv 2010.08899: at least 100 times fewer bytes without loss)",
        experiments=("dct_dp",),
        where="lifetime.isna() or lifetime == 64",
    ),
    CompressionStudy(
        "dct_lifetime",
        "NE, bytes and time against L, steps for which a threshold is kept",
        experiments=("dct_dp", "dct_lifetime"),
        where="method == 'none' or (method == 'dct' and scope == 'model' and density == 0.005 and warmup_steps == 40)",
    ),
    CompressionStudy("dct_2d", "both halves of DCT on 2D", experiments=("dct_2d",), options=BOTH),
    CompressionStudy("dct_qps", "both halves of DCT on slow links", experiments=("dct_qps",), options=BOTH),
]
LOOKUPS = [LookupStudy("dct_mp", "pooled embeddings (arXiv 2010.08899: 20 times fewer bytes without loss)")]
TABLES: dict[str, Study | Detail | QpsStudy | CompressionStudy | LookupStudy] = {study.name: study for study in STUDIES}
TABLES |= {study.name: study for study in COMPRESSION}
TABLES |= {study.name: study for study in LOOKUPS}
TABLES |= {detail.name: detail for detail in DETAILS}
TABLES |= {study.name: study for study in QPS}


def main(config: ReportConfig) -> None:
    """Write and print every table that has runs; then the report of all tables and figures that are there."""
    results_dir = Path(config.results_dir)
    if unknown := set(config.tables) - set(TABLES):
        raise UserError(f"unknown table {sorted(unknown)[0]!r}; choose from: {', '.join(TABLES)}")
    for name in config.tables or TABLES:
        table = TABLES[name].build(results_dir)
        if table.empty:
            continue
        path = results_dir / "tables" / f"{name}.csv"
        _write(path, table, results_dir / "runs")
        shared = SHARED if isinstance(TABLES[name], QpsStudy) else COMPARISON
        show(table, f"{name} ({path})", TABLES[name].caption, shared)
    if not any((results_dir / "tables").glob("*.csv")):
        raise UserError(
            f"no finished runs under {results_dir / 'runs'} for: {', '.join(config.tables or TABLES)}; "
            f"first run python -m sparse2d.train -m experiment={next(iter(config.tables or TABLES))}"
        )
    if not claims_file().is_file():
        log.info("tables only: the claims of the report are in a checkout, and this is an installed package")
        return
    claims = read_claims(claims_file())
    write_views([view for claim in claims for view in claim.tables], results_dir / "tables")
    for page in write_report(claims, results_dir, results_dir.parent / "paper_figures"):
        log.info("report: %s", page)


def _write(path: Path, table: pd.DataFrame, runs_dir: Path) -> None:
    """Write a table; that one with other figures was there, maybe a committed one, is said."""
    text = table.to_csv(index=False, float_format="%.6g")
    if path.exists() and path.read_text() != text:
        runs = {name for names in table["fingerprints"].dropna() for name in names.split()}
        log.info("%s is replaced: its %d rows are of %d runs under %s", path, len(table), len(runs), runs_dir)
    write_atomically(path, text)


# Columns that a reader compares: heading, alignment, format.
SHOWN = {
    "label": ("label", "left", ""),
    "parallelism": ("parallelism", "left", ""),
    "num_groups": ("M", "right", ".0f"),
    "group_size": ("N", "right", ".0f"),
    "replicas": ("replicas", "left", ""),
    "sync_rows": ("rows", "left", ""),
    "optimizer": ("optimizer", "left", ""),
    "moment_scale": ("c", "right", "g"),
    "combine": ("combine", "left", ""),
    "sync_interval": ("K", "right", ".0f"),
    "sync_moments": ("moments", "left", ""),
    "method": ("method", "left", ""),
    "density": ("density", "right", "g"),
    "lifetime": ("L", "right", ".0f"),
    "warmup_steps": ("warm-up", "right", ".0f"),
    "lookup_method": ("lookups", "left", ""),
    "lookup_density": ("density", "right", "g"),
    "ne": ("NE", "right", ".4f"),
    "auc": ("AUC", "right", ".4f"),
    "ne_gap_pct": ("NE gap %", "right", "+.3f"),
    "ne_gap_pct_ci95": ("+-95%", "right", ".3f"),
    "progressive_gap_pct": ("progressive %", "right", "+.3f"),
    "progressive_gap_pct_ci95": ("+-95%", "right", ".3f"),
    "bytes_ratio": ("fewer bytes", "right", ".1f"),
    "steady_bytes_ratio": ("after warm-up", "right", ".1f"),
    "lookup_bytes_ratio": ("of lookups", "right", ".1f"),
    "qps_ratio": ("QPS ratio", "right", ".2f"),
    "sent_share": ("sent", "right", ".4f"),
    "compress_ms": ("compress ms", "right", ".3f"),
    "seen_from": ("seen from", "right", ".0f"),
    "samples": ("samples", "right", ".0f"),
    "qps": ("QPS", "right", ".0f"),
    "qps_min": ("least", "right", ".0f"),
    "qps_max": ("most", "right", ".0f"),
    "ratio_to_full_mp": ("/ full MP", "right", ".2f"),
    "step_ms": ("step ms", "right", ".0f"),
    "n_seeds": ("seeds", "right", ".0f"),
}


def show(table: pd.DataFrame, title: str, caption: str, shared: list[str]) -> None:
    """Print the table, one comparison below the other: rows with the same values in the columns ``shared``."""
    console = Console(width=200)
    for comparison, rows in table.groupby(shared, dropna=False):
        settings = ", ".join(
            f"{key} {value}" for key, value in zip(shared, comparison, strict=True) if key != "settings"
        )
        printed = Table(title=f"{title}\n{settings}", caption=caption)
        shown = {column: how for column, how in SHOWN.items() if column in rows and rows[column].notna().any()}
        for heading, side, _ in shown.values():
            printed.add_column(heading, justify="left" if side == "left" else "right", no_wrap=True)
        for _, row in rows.iterrows():
            printed.add_row(*(_cell(row[column], form) for column, (_, _, form) in shown.items()))
        console.print(printed)


def _cell(value: object, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form)  # type: ignore[call-overload]


if __name__ == "__main__":
    run_entry_point("report", ReportConfig, main)
