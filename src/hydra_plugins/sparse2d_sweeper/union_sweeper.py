"""Multiruns over a union of grids, which Hydra's basic sweeper, one grid at a time, cannot express.

Hydra takes plugins from the namespace package ``hydra_plugins`` only, hence the place of this file.
"""

import logging
import shlex
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from sparse2d.errors import BusyError, UserError
from sparse2d.launch import RanksFailedError
from sparse2d.mesh import rank_from_env
from sparse2d.sweeps import SweepManifest

# Between two looks at runs that another process is at.
POLL_S = 5

log = logging.getLogger("sparse2d.sweep")


class UnionSweeper(Sweeper):
    """Runs every job of every arm; a failing job is told at once and the others still run.

    An arm is a line of overrides, each of which may list several values, as on the command line::

        arms:
          - parallelism=full_mp
          - parallelism=sparse_2d parallelism.num_groups=2,4,8

    Every arm is crossed with ``params`` and with the sweeps of the command line, which win over both.

    Args:
        arms: the grids to unite; none means one grid, of ``params`` and the command line.
        params: sweeps common to all arms.
    """

    def __init__(self, arms: Sequence[str], params: dict[str, str]) -> None:
        self._arms = list(arms) or [""]
        self._params = dict(params)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's hook before ``sweep``."""
        self._hydra_context = hydra_context
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def jobs(self, arguments: Sequence[str]) -> list[list[str]]:
        """The overrides of each job, each job once, in order."""
        parser = OverridesParser.create(config_loader=self._hydra_context.config_loader)
        common = [f"{key}={value}" for key, value in self._params.items()]
        jobs: dict[frozenset[str], list[str]] = {}
        for arm in self._arms:
            # split_arguments keeps the last value of a key, so the command line wins.
            overrides = parser.parse_overrides([*common, *shlex.split(arm), *arguments])
            for batch in BasicSweeper.split_arguments(overrides, None):
                for job in batch:
                    jobs.setdefault(frozenset(job), job)
        return list(jobs.values())

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Run all jobs: one after the other here, or at once where a launcher submits them to a cluster.

        Under torchrun each rank runs all of them, at the same time as the others; the first one speaks and writes.

        Raises:
            UserError: if there is no such cluster; at the end, if a job failed, or at once with ``fail_fast=true``
                and under torchrun.
        """
        jobs = self.jobs(arguments)
        rank = rank_from_env()
        is_first = rank is None or rank.is_first
        log.setLevel(logging.INFO if is_first else logging.ERROR)
        for job in jobs:
            # One that does not compose would end the sweep in its middle: refuse it before any job runs.
            self._hydra_context.config_loader.load_sweep_config(self._config, job)
        self._refuse_missing_cluster()
        manifest = SweepManifest(self._config.results_dir, self._config.experiment, jobs, writes=is_first)
        log.info("%d jobs: %s", len(jobs), manifest.path)
        results = (
            self._one_by_one(jobs, manifest)
            if isinstance(self._launcher, BasicLauncher)
            else self._all_at_once(jobs, manifest)
        )
        failed = [str(index + 1) for index, result in sorted(results.items()) if _has_failed(result)]
        if failed:
            raise UserError(f"{len(failed)} of {len(jobs)} jobs failed (job {', '.join(failed)}): {manifest.path}")
        return [results[index] for index in sorted(results)]

    def _refuse_missing_cluster(self) -> None:
        """Before any job is told of: submitit would say it after all of them."""
        choices = self._config.hydra.runtime.choices
        if choices["hydra/launcher"] == "submitit_slurm" and shutil.which("srun") is None:
            raise UserError(
                f"launch={choices['launch']} submits to Slurm, and there is no srun here: start it on a login node, or "
                "leave launch out to run the jobs here"
            )

    def _one_by_one(self, jobs: list[list[str]], manifest: SweepManifest) -> dict[int, JobReturn]:
        """Jobs that another sweep is at come last, so that two of the same kind share the work."""
        results: dict[int, JobReturn] = {}
        queue = deque(range(len(jobs)))
        busy = 0
        # One rank must not go on to a job that the others are not at.
        is_alone = rank_from_env() is None
        while queue:
            index = queue.popleft()
            log.info("job %d of %d: %s", index + 1, len(jobs), " ".join(jobs[index]))
            manifest.set(index, "running")
            try:
                result = self._launcher.launch([jobs[index]], initial_job_idx=index)[0]
            except BaseException as error:
                manifest.set(index, "interrupted", _line(error))
                raise
            if isinstance(result._return_value, BusyError) and is_alone:
                log.info("job %d: another process is at it; it comes last", index + 1)
                manifest.set(index, "waiting")
                queue.append(index)
                busy += 1
                if busy >= len(queue):
                    time.sleep(POLL_S)
                continue
            busy = 0
            results[index] = result
            self._tell(index, result, manifest)
            if _has_failed(result) and (self._config.get("fail_fast", False) or not is_alone):
                break
        return results

    def _all_at_once(self, jobs: list[list[str]], manifest: SweepManifest) -> dict[int, JobReturn]:
        for index, job in enumerate(jobs):
            log.info("job %d of %d: %s", index + 1, len(jobs), " ".join(job))
            manifest.set(index, "running")
        results = dict(enumerate(self._launcher.launch(jobs, initial_job_idx=0)))
        for index, result in results.items():
            self._tell(index, result, manifest)
        return results

    @staticmethod
    def _tell(index: int, result: JobReturn, manifest: SweepManifest) -> None:
        if not _has_failed(result):
            manifest.set(index, "completed", run=result._return_value)
            return
        error: Any = result._return_value
        expected = isinstance(error, UserError | RanksFailedError)
        # The run's folder, where there was one.
        run = next(iter(getattr(error, "__notes__", [])), None)
        log.error(
            "job %d failed: %s%s", index + 1, error, f" -> {run}" if run else "", exc_info=None if expected else error
        )
        manifest.set(index, "failed", _line(error), run)


def _has_failed(result: JobReturn) -> bool:
    return bool(result.status is not JobStatus.COMPLETED)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@dataclass
class UnionSweeperConf:
    """``hydra/sweeper=union``."""

    _target_: str = "hydra_plugins.sparse2d_sweeper.union_sweeper.UnionSweeper"
    arms: list[str] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="union", node=UnionSweeperConf, provider="sparse2d")
