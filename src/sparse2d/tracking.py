"""wandb: one run per job, from rank 0 only; nothing depends on it."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from requests.utils import get_netrc_auth

from sparse2d.config import TrackingConfig, WandbMode

log = logging.getLogger(__name__)


class Tracker:
    """A wandb run that is finished with the right exit code however the block ends.

    Offline needs neither a key nor a network; online takes the key that ``wandb login`` stored and never prompts.

    Args:
        config: mode, project, entity, group.
        run_dir: where the run's files go (``run_dir/wandb``).
        name: shown in wandb.
        group: runs that differ in the seed alone, unless the config names one.
        job_type: the experiment.
        settings: the resolved config of the run.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_dir: Path,
        name: str,
        group: str,
        job_type: str,
        settings: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._name = name
        self._group = config.group or group
        self._job_type = job_type
        self._settings = settings
        self._run: Any = None

    def __enter__(self) -> "Tracker":
        if self._config.mode is WandbMode.disabled:
            return self
        import wandb

        mode = self._mode()
        try:
            self._run = self._started(mode)
        except (wandb.Error, OSError) as error:
            told = f"wandb does not start ({_line(error)})"
            if mode == "offline":
                log.warning("%s: this run goes on without it; metrics.jsonl has everything", told)
            else:
                log.warning("%s: this run is kept offline; `wandb sync` uploads it later", told)
                self._run = self._started("offline")
        return self

    def _started(self, mode: Literal["offline", "online"]) -> Any:
        import wandb

        return wandb.init(
            mode=mode,
            project=self._config.project,
            entity=self._config.entity,
            group=self._group,
            job_type=self._job_type,
            name=self._name,
            dir=self._run_dir,
            config=dict(self._settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def _mode(self) -> Literal["offline", "online"]:
        """Online only with a key at hand: without one wandb would ask for it on the terminal."""
        if self._config.mode is WandbMode.offline:
            return "offline"
        import wandb

        if os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url):
            return "online"
        log.warning("tracking.mode=online, but there is no wandb key (run `wandb login`): this run is kept offline")
        return "offline"

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log one point; nulls are left out, since wandb would plot them as zero."""
        if self._run is not None:
            self._run.log({key: value for key, value in values.items() if value is not None}, step=step)

    @property
    def is_on(self) -> bool:
        """Whether there is a wandb run."""
        return self._run is not None

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Log a table."""
        if self._run is not None:
            import wandb

            self._run.log({name: wandb.Table(columns=columns, data=rows)}, step=step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        """Log a picture, which wandb copies."""
        if self._run is not None:
            import wandb

            self._run.log({name: wandb.Image(str(path))}, step=step)

    def summarise(self, values: Mapping[str, Any]) -> None:
        """Set the run's final figures."""
        if self._run is not None:
            self._run.summary.update({key: value for key, value in values.items() if value is not None})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if kind is None else 1)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
