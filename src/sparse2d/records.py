"""The run record: what was run, on what, and what came out, one folder for each distinct config."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig

from sparse2d import __version__
from sparse2d.config import EngineKind, Timing, TrainConfig
from sparse2d.data.atomic import replacing
from sparse2d.environment import found_versions
from sparse2d.errors import BusyError, UserError, refusals_told
from sparse2d.testbed.description import description_here

SCHEMA = 1
# Where results go and how they are watched does not change them; digests stand for the paths of data and plan.
NOT_FINGERPRINTED = ("results_dir", "rerun", "fail_fast", "tracking", "plan_only", "plan_out")
DATA_NOT_FINGERPRINTED = (
    "path",
    "raw_dir",
    "out_dir",
    "days",
    "workers",
    "on_bad_line",
    "max_rejects",
    "vocabulary",
)


_PROVENANCE = {EngineKind.distributed: "measured", EngineKind.emulated: "emulated"}


def provenance(config: TrainConfig) -> str:
    """The label of what this run finds: measured, shaped or emulated."""
    return _PROVENANCE[config.engine] if description_here() is None else "shaped"


def plain(value: Any) -> Any:
    """A dataclass, enum or container as what JSON and YAML can hold; enums become their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def fingerprint(config: TrainConfig, data_digest: str, plan_digest: str | None = None) -> str:
    """16 hex digits over everything that decides the result: the resolved config, the data's and the plan's content."""
    settings = {key: value for key, value in plain(config).items() if key not in NOT_FINGERPRINTED}
    settings["data"] = {key: value for key, value in settings["data"].items() if key not in DATA_NOT_FINGERPRINTED}
    settings["data"]["digest"] = data_digest
    settings["parallelism"]["plan_file"] = plan_digest
    settings["launch"].pop("max_restarts")
    # It is in B.
    settings.pop("rank_batch_size")
    # Where a run starts from decides its result; when it writes checkpoints of its own does not.
    settings.pop("checkpoint")
    if config.checkpoint.resume_path is not None:
        settings["resume"] = config.checkpoint.resume
    # What a run measures changes its record only; a record that lacks it is no substitute.
    if config.timing is Timing.steps:
        settings.pop("timing")
    if not config.profile:
        settings.pop("profile")
    # Runs of before there was compression keep their fingerprints.
    if not config.compression.is_on:
        settings.pop("compression")
    if config.frequency_bins is None:
        settings.pop("frequency_bins")
    if config.eval_every is None:
        settings.pop("eval_every")
    if (testbed := description_here()) is not None:
        settings["testbed"] = testbed["config"]
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seeds_group(config: TrainConfig, data_digest: str) -> str:
    """Name of the runs that differ in the seed alone, an order of rows that follows the seed included."""
    follows = config.data.shuffle_seed == config.seed
    data = dataclasses.replace(config.data, shuffle_seed=0) if follows else config.data
    seedless = dataclasses.replace(config, seed=0, data=data)
    return f"{config.experiment}-{fingerprint(seedless, data_digest)[:8]}"


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing, and the folder it goes to if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text)


class RunDirectory:
    """``results/runs/<experiment>/<fingerprint>/`` and the files in it.

    Args:
        config: of the run.
        data_digest: of the data it reads.
        plan_digest: of the plan that it pins, if any.
    """

    def __init__(self, config: TrainConfig, data_digest: str, plan_digest: str | None = None) -> None:
        self.fingerprint = fingerprint(config, data_digest, plan_digest)
        self.path = Path(config.results_dir) / "runs" / config.experiment / self.fingerprint
        self._config = config
        self._started_at = datetime.now(UTC)
        self._lock = FileLock(self.path / ".lock")

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        """Where ranks under torchrun leave why they ended."""
        return self.path / "failures"

    def completed_record(self) -> dict[str, Any] | None:
        """The record of a finished run of the same fingerprint, if there is one."""
        try:
            record = json.loads((self.path / "record.json").read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        return record if record.get("status") == "completed" else None

    def begin(self, is_restart: bool = False) -> None:
        """Clear what an earlier attempt left and write the resolved config; there is no record until the run ends.

        Checkpoints stay, and with them the log and the points so far, unless the run is to start anew.

        Args:
            is_restart: whether a launcher has started the ranks again, in which case nothing starts anew.

        Raises:
            BusyError: if another process is at the same run.
            UserError: if the folder cannot be written.
        """
        try:
            with refusals_told(self._config.results_dir):
                self._begin(is_restart)
        except Timeout as error:
            raise BusyError(f"{self.path}: another process is at this run; wait for it, or stop it") from error
        except UserError:
            self._lock.release()
            raise

    def _begin(self, is_restart: bool) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(timeout=0)
        checkpoint = self._config.checkpoint
        starts_anew = not is_restart and (self._config.rerun or checkpoint.resume == "never")
        for folder in (self.failures, *([self.checkpoints] if starts_anew else [])):
            if folder.exists():
                shutil.rmtree(folder)
        goes_on = checkpoint.interval is not None and self.checkpoints.exists()
        for name in ("record.json", *([] if goes_on else ["metrics.jsonl", "run.log"])):
            (self.path / name).unlink(missing_ok=True)
        write_atomically(self.path / "config.yaml", yaml.safe_dump(plain(self._config), sort_keys=False))

    def finish(self, status: str, error: str | None, results: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``record.json``, the last file of a run.

        Args:
            status: completed, failed or interrupted.
            error: one line, unless completed.
            results: the measured parts (data, eval, train, plan, comms, memory).

        Raises:
            UserError: if the file cannot be written.
        """
        finished_at = datetime.now(UTC)
        testbed = description_here()
        record = {
            "schema": SCHEMA,
            "status": status,
            "error": error,
            "provenance": provenance(self._config),
            **({} if testbed is None else {"testbed": testbed}),
            "experiment": self._config.experiment,
            "fingerprint": self.fingerprint,
            "command": shlex.join([Path(sys.executable).name, "-m", *command_words()]),
            **_git_state(),
            "versions": versions(),
            "host": host(),
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "finished_at": finished_at.isoformat(timespec="seconds"),
            "wall_s": (finished_at - self._started_at).total_seconds(),
            "seed": self._config.seed,
            "config": plain(self._config),
            **results,
        }
        try:
            with refusals_told(self._config.results_dir):
                write_atomically(self.path / "record.json", json.dumps(record, indent=2, allow_nan=False) + "\n")
        finally:
            self._lock.release()
        return record


class MetricsFile:
    """``metrics.jsonl``: one complete JSON object a line, flushed at once.

    Args:
        path: of the file.
        done_steps: points of an earlier attempt up to this step stay; later ones will be made again.
    """

    def __init__(self, path: Path, done_steps: int = 0) -> None:
        if path.exists():
            write_atomically(path, "".join(line for line in _whole_lines(path) if _is_done(line, done_steps)))
        self._file = path.open("a", buffering=1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one point."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """Lines of a file; a kill may have cut the last one off."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _is_done(line: str, done_steps: int) -> bool:
    """Whether a point is of training up to ``done_steps``; the evaluation comes after all of it."""
    point = json.loads(line)
    return bool(point["step"] <= done_steps and "rows" in point)


def versions() -> dict[str, str | None]:
    """What the numbers were made with."""
    names = ("hydra-core", "numpy", "scikit-learn", "wandb")
    return {
        "sparse2d": __version__,
        "python": platform.python_version(),
        **found_versions(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def host() -> dict[str, Any]:
    """The machine, without its name's domain."""
    return {
        "name": platform.node().split(".")[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
    }


def forget_peak_rss() -> None:
    """Have ``peak_rss_bytes`` begin anew, where the system can do that: a sweep's jobs may share a process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far (Linux counts KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def command_words() -> list[str]:
    """What the user may type again after ``python -m``: the module's name for its file's path, and the arguments."""
    if "SUBMITIT_EXECUTOR" in os.environ and HydraConfig.initialized():
        # A job on a cluster was started with a pickled function; these are its options.
        hydra = HydraConfig.get()
        return [f"sparse2d.{hydra.job.name}", *hydra.overrides.task]
    program = Path(sys.argv[0])
    module = f"sparse2d.{program.stem}" if program.parent.name == "sparse2d" else program.name
    return [module, *sys.argv[1:]]


def _git_state() -> dict[str, Any]:
    """Commit and cleanliness of the checkout that this package runs from; null outside of one."""
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": None, "git_dirty": None}
