"""The manifest of a sweep: which jobs it has and what became of each, in one small file."""

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sparse2d.errors import refusals_told
from sparse2d.records import command_words, write_atomically

SCHEMA = 1


class SweepManifest:
    """``results/sweeps/<experiment>-<8 hex digits>.json``, rewritten whole whenever a job's status changes.

    The digits are a hash over the jobs, so that the same sweep, started again, has the same manifest.

    Args:
        results_dir: of the sweep.
        experiment: names it.
        jobs: overrides of each job.
        writes: whether this process keeps the file; of several ranks one does.

    Raises:
        UserError: if ``results_dir`` cannot be written.
    """

    def __init__(self, results_dir: str, experiment: str, jobs: Sequence[Sequence[str]], writes: bool = True) -> None:
        self._writes = writes
        self._results_dir = results_dir
        digest = hashlib.sha256(json.dumps([sorted(job) for job in jobs]).encode()).hexdigest()[:8]
        self.path = Path(results_dir) / "sweeps" / f"{experiment}-{digest}.json"
        self._content = {
            "schema": SCHEMA,
            "command": shlex.join([Path(sys.executable).name, "-m", *command_words()]),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._jobs = [
            {"job": number, "status": "waiting", "error": None, "run": None, "overrides": list(job)}
            for number, job in enumerate(jobs, start=1)
        ]
        self._write()

    def set(self, index: int, status: str, error: str | None = None, run: str | None = None) -> None:
        """Say what became of a job.

        Args:
            index: of the job, from 0.
            status: waiting, running, completed, failed or interrupted.
            error: one line, if it failed.
            run: the run's folder, if there is one.
        """
        self._jobs[index] |= {"status": status, "error": error, "run": run}
        self._write()

    def _write(self) -> None:
        if not self._writes:
            return
        # A job on each line: a sweep of hundreds stays readable, and grep finds the failed ones.
        jobs = ",\n".join(f"  {json.dumps(job)}" for job in self._jobs)
        head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in self._content.items()]
        with refusals_told(self._results_dir):
            write_atomically(self.path, "\n".join(["{", *head, ' "jobs": [', jobs, " ]", "}", ""]))
