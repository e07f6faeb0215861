"""Preemption: ranks that are told to end (SIGTERM) agree on a step, so that all of them save the same one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Where our own launcher asks its ranks to stop; under torchrun the signal itself reaches them.
STOP_FILE = "SPARSE2D_STOP_FILE"
EXIT_CODE = 128 + signal.SIGTERM


class PreemptedError(SystemExit):
    """The run was told to end and did so in order; the process ends with SIGTERM's exit code, 143."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = EXIT_CODE


def terminate(*_: Any) -> None:
    """Turn SIGTERM into an exception, so that records and wandb runs are closed as failed."""
    raise SystemExit(EXIT_CODE)


class StopRequest:
    """Whether some rank was told to end, agreed upon by all ranks.

    The agreement costs a step no waiting: the reduction begun after one step is read after the next one.
    """

    def __init__(self) -> None:
        self._asked = False
        path = os.environ.get(STOP_FILE)
        self._file = Path(path) if path is not None else None
        self._pending: tuple[Any, Any] | None = None

    @contextmanager
    def deferring_signals(self) -> Iterator[None]:
        """SIGTERM is a request during the block; a second one ends this rank at once."""
        previous = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _ask(self, *_: Any) -> None:
        if self._asked:
            terminate()
        self._asked = True

    def agreed(self) -> bool:
        """Call once after each step: true on all ranks after the same step, at most two after the request."""
        import torch
        import torch.distributed as dist

        agreed = False
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = bool(flag.item())
        asked = self._asked or (self._file is not None and self._file.exists())
        flag = torch.tensor(int(asked))
        self._pending = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True), flag)
        return agreed

    def finish(self) -> None:
        """Read the last reduction, which no rank may leave behind."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
