"""What the launcher gives to every rank; importing this costs neither torch nor TorchRec, which only ranks need."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse2d.config import TrainConfig


@dataclass(frozen=True)
class Job:
    """One configuration to run.

    Attributes:
        config: of the run, settled.
        dataset: folder of its arrays.
        run_dir: where its files go.
        fingerprint: names the run.
        launched_at: wall clock, in seconds, when the launcher started the ranks.
    """

    config: TrainConfig
    dataset: Path
    run_dir: Path
    fingerprint: str
    launched_at: float


def run_job(job: Job) -> dict[str, Any]:
    """``loop.run_rank``, for launchers that do not import it themselves."""
    from sparse2d.loop import run_rank

    return run_rank(job)
