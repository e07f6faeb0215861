"""Multiruns over a union of grids, which Hydra's basic sweeper, one grid at a time, cannot express.

Hydra takes plugins from the namespace package ``hydra_plugins`` only, hence the place of this file.
"""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from sparse2d.errors import UserError
from sparse2d.launch import RanksFailedError

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
        """Run all jobs.

        Raises:
            UserError: at the end, if a job failed.
        """
        jobs = self.jobs(arguments)
        for job in jobs:
            # One that does not compose would end the sweep in its middle: refuse it before any job runs.
            self._hydra_context.config_loader.load_sweep_config(self._config, job)
        results: list[JobReturn] = []
        failed: list[str] = []
        for index, job in enumerate(jobs):
            log.info("job %d of %d: %s", index + 1, len(jobs), " ".join(job))
            result = self._launcher.launch([job], initial_job_idx=index)[0]
            results.append(result)
            if result.status is not JobStatus.COMPLETED:
                failed.append(str(index + 1))
                self._tell(index + 1, result)
        if failed:
            raise UserError(f"{len(failed)} of {len(jobs)} jobs failed (job {', '.join(failed)})")
        return results

    @staticmethod
    def _tell(number: int, result: JobReturn) -> None:
        error: Any = result._return_value
        expected = isinstance(error, UserError | RanksFailedError)
        log.error("job %d failed: %s", number, error, exc_info=None if expected else error)


@dataclass
class UnionSweeperConf:
    """``hydra/sweeper=union``."""

    _target_: str = "hydra_plugins.sparse2d_sweeper.union_sweeper.UnionSweeper"
    arms: list[str] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="union", node=UnionSweeperConf, provider="sparse2d")
