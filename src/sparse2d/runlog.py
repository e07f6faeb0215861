"""What a run says while it runs: metrics.jsonl, wandb, run.log, and a bar or lines on the terminal (rank 0 only)."""

import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparse2d.config import TrainConfig
from sparse2d.curves import draw_curves
from sparse2d.plan import Plan
from sparse2d.records import MetricsFile, plain, provenance, seeds_group
from sparse2d.tracking import Tracker

log = logging.getLogger(__name__)

PLAN_COLUMNS = ["table", "sharding", "rank", "first_row", "last_row", "first_column", "last_column"]
BYTES = ("lookup_bytes_per_step", "sync_bytes_per_sync", "dense_bytes_per_step")


def configure_rank_logging(run_dir: Path, is_first: bool) -> None:
    """Rank 0 tells its story on stderr and, with the libraries' warnings, in run.log; other ranks are silent."""
    torch._logging.set_logs(all=logging.ERROR)
    logging.captureWarnings(True)
    # Deprecations inside TorchRec, one for each collective, are nothing a user can act on.
    warnings.simplefilter("ignore", FutureWarning)
    root, ours = logging.getLogger(), logging.getLogger("sparse2d")
    # TorchRec logs through the root logger while it is imported, which gives it a handler on stderr.
    root.handlers.clear()
    ours.handlers.clear()
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO if is_first else logging.ERROR)
    if is_first:
        to_file = _LogFile(run_dir / "run.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(to_file)
        ours.addHandler(_Terminal())
    else:
        root.addHandler(logging.NullHandler())


class _LogFile(logging.FileHandler):
    """A full disk ends the run in one line; logging would print a traceback for each line that it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        raise  # what was caught by the caller


class _Terminal(logging.Handler):
    """Standard error as it is at the moment: while there is a bar, rich puts lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


class RunLog:
    """Takes the points of a run and passes them on; does nothing on ranks other than 0.

    Args:
        config: of the run.
        run_dir: where its files go.
        fingerprint: names it.
        data_digest: of its data.
        is_first: whether this is rank 0.
        done_steps: steps that an earlier attempt did; its points up to there stay.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        fingerprint: str,
        data_digest: str,
        is_first: bool,
        done_steps: int = 0,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._fingerprint = fingerprint
        self._data_digest = data_digest
        self._is_first = is_first
        self._done_steps = done_steps
        self._stack = ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> "RunLog":
        if not self._is_first:
            return self
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl", self._done_steps)
        self._stack.callback(self._metrics.close)
        tracker = Tracker(
            self._config.tracking,
            self._run_dir,
            name=f"{self._config.experiment}/{self._fingerprint}",
            group=seeds_group(self._config, self._data_digest),
            job_type=self._config.experiment,
            settings=plain(self._config),
        )
        self._tracker = self._stack.enter_context(tracker)
        return self

    def start_training(self, total_steps: int) -> None:
        """Show a bar if there is a terminal to show it on."""
        console = Console(stderr=True)
        if self._is_first and console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = self._stack.enter_context(Progress(*columns, console=console, transient=True))
            self._task = self._bar.add_task("", total=total_steps, completed=self._done_steps, figures="")

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def log(self, point: Mapping[str, Any]) -> None:
        """Write one point; ``step`` is its axis."""
        if not self._is_first:
            return
        self._metrics.write(point)
        # wandb keeps the last value of each curve in its summary, where ne, auc and qps are the run's final figures.
        curves = {key if "/" in key else f"train/{key}": value for key, value in point.items() if key != "step"}
        self._tracker.log(curves, step=point["step"])
        shown = {key: value for key, value in point.items() if key != "step" and not key.startswith("rank0/")}
        figures = " ".join(f"{key} {_short(value)}" for key, value in shown.items())
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
        else:
            log.info("step %d: %s", point["step"], figures)

    def show_plan(self, plan: Plan) -> None:
        """Which rank of a group holds which part of which table."""
        if self._is_first:
            self._tracker.log_table("plan", PLAN_COLUMNS, plan_rows(plan), step=self._done_steps)

    def summarise(self, results: Mapping[str, Any]) -> None:
        """The run's final figures, under the names that the tables' columns have, and its curves as a picture.

        Args:
            results: the measured parts of the record.
        """
        if not self._is_first:
            return
        config = plain(self._config)
        self._tracker.summarise(
            {
                "label": provenance(self._config),
                "num_ranks": self._config.launch.num_ranks,
                "parallelism": config["parallelism"]["kind"],
                "num_groups": self._config.parallelism.num_groups,
                "optimizer": config["optimizer"]["name"],
                "moment_scale": self._config.optimizer.moment_scale,
                "combine": config["sync"]["combine"],
                "sync_interval": self._config.sync.interval,
                "ne": results["eval"]["ne"],
                "auc": results["eval"]["auc"],
                "qps": results["train"]["qps"],
                "step_ms_p50": results["train"]["step_ms"]["p50"],
                "imbalance": results["plan"]["imbalance"],
                "fingerprint": self._fingerprint,
                **results["memory"],
                **{name: _mean(results["comms"][name]) for name in BYTES},
            }
        )
        if self._tracker.is_on:
            picture = self._run_dir / "curves.png"
            draw_curves(self._run_dir / "metrics.jsonl", picture)
            self._tracker.log_image("curves", picture, step=results["train"]["steps"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def plan_rows(plan: Plan) -> list[list[Any]]:
    """A row of ``PLAN_COLUMNS`` for each shard."""
    return [
        [table.name, table.sharding, shard.rank, *shard.rows, *shard.columns]
        for table in plan.tables
        for shard in table.shards
    ]


def _mean(sent: Mapping[str, float] | None) -> float | None:
    """Over the ranks; emulated ones send nothing."""
    return None if sent is None else sent["mean"]


def _short(value: Any) -> str:
    return "undefined" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
