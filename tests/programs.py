"""Programs that tests start as a user would: in a session of their own, with nothing of them left afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Only to end a test that would wait for ever.
PATIENCE_S = 120


def environment(**changes: str) -> dict[str, str]:
    """This process's, less what a launcher of ranks or another test may have put there."""
    dropped = ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")
    return {name: value for name, value in os.environ.items() if name not in dropped} | changes


@contextmanager
def started(*arguments: str, module: str = "sparse2d.train", **options) -> Iterator[subprocess.Popen[str]]:
    """``python -m module arguments``, its outputs piped unless told otherwise."""
    command = [sys.executable, "-m", *module.split(), *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Until the condition holds, which it must before the program ends."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.03)
