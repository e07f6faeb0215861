"""Starts ranks on this machine from a warm fork server and names the root cause when one fails.

``start_method="spawn"`` would make each rank import TorchRec for itself (80 s for 8 ranks on 2 cores); the fork
server imports it once and lives as long as this process, so a sweep pays for it once.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from sparse2d.errors import UserError

T = TypeVar("T")

# What the fork server imports before the first rank is forked.
PRELOAD = ["torch", "torch.distributed.tensor", "torchrec", "fbgemm_gpu", "wandb", "sparse2d.loop"]
# gloo's and NCCL's errors on the surviving ranks are consequences, never the cause.
PEER_LOSS = ("Connection closed by peer", "Connection reset", "Broken pipe", "[gloo]", "NCCL", "DistBackendError")
# How long a rank has to close its files once it is told to end.
SHUTDOWN_S = 5
# How long a rank that lost its peer waits, so that the launcher first sees the peer that failed.
CONSEQUENCE_DELAY_S = 2


@dataclass(frozen=True)
class RankFailure:
    """Why one rank ended."""

    rank: int
    time: float
    error: str
    traceback: str
    from_user: bool

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only lost a peer that had failed before."""
        return any(mark in self.error for mark in PEER_LOSS)


class RanksFailedError(RuntimeError):
    """At least one rank failed; the text names the root cause and its rank."""

    def __init__(self, cause: RankFailure) -> None:
        super().__init__(f"rank {cause.rank}: {cause.error}")
        self.cause = cause


def run_ranks(fn: Callable[..., T], *args: Any, num_ranks: int) -> T:
    """Run ``fn(*args)`` on ``num_ranks`` new ranks of this machine and return rank 0's result.

    ``fn`` and ``args`` must be picklable. Ranks find themselves through RANK/WORLD_SIZE (see ``mesh.py``).

    Raises:
        UserError: if the first failure was one, with its rank.
        RanksFailedError: on any other failure; all ranks are gone when it is raised.
    """
    # Heavy; an entry point that only prints help must not pay for it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _start_fork_server()
    # gloo announces each connection on stderr.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The agent and the process pool report each lost rank in a dozen lines; the root cause is told here, once.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="sparse2d-ranks-") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver",
            # SIGINT and SIGTERM stay our own exceptions (KeyboardInterrupt, SystemExit), upon which the agent ends the
            # ranks with SIGTERM; its handlers would pass on the SIGINT, which ranks ignore.
            signals_to_handle="SIGQUIT",
            shutdown_timeout=SHUTDOWN_S,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            results: dict[int, T] = elastic_launch(config, _rank_main)(fn, args, scratch)
        except ChildFailedError as error:
            cause = _root_cause(Path(scratch), error)
            if cause.from_user:
                raise UserError(cause.error) from None
            raise RanksFailedError(cause) from None
    return results[0]


def _start_fork_server() -> None:
    """Start the fork server unless it runs; Ctrl-C, which reaches the whole terminal group, is not its business."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def _rank_main(fn: Callable[..., T], args: tuple[Any, ...], scratch: str) -> T:
    """What each rank runs: ``fn``, with any failure written down before the process ends."""
    # Ctrl-C reaches the whole terminal group; the launcher alone decides how ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        return fn(*args)
    except Exception as error:
        from_user = isinstance(error, UserError)
        failure = RankFailure(
            rank=int(os.environ["RANK"]),
            time=time.time(),
            error=str(error) if from_user else f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            from_user=from_user,
        )
        Path(scratch, f"failure-{failure.rank}.json").write_text(json.dumps(asdict(failure)))
        if failure.is_consequence:
            time.sleep(CONSEQUENCE_DELAY_S)
        # The launcher tells the story once; eight tracebacks would bury it.
        sys.exit(1)


def terminate(*_: Any) -> None:
    """Turn SIGTERM into an exception, so that records and wandb runs are closed as failed."""
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_launcher() -> None:
    """End this rank when the launcher is gone (killed by SIGKILL, say): nobody else would."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_S)
    os._exit(1)


def _root_cause(scratch: Path, error: Any) -> RankFailure:
    """The earliest failure that is not just the loss of a peer, else a rank that a signal killed, else the earliest."""
    failures = [RankFailure(**json.loads(path.read_text())) for path in scratch.glob("failure-*.json")]
    failures.sort(key=lambda failure: failure.time)
    for failure in failures:
        if not failure.is_consequence:
            return failure
    for rank, process in error.failures.items():
        if process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return RankFailure(rank, time.time(), f"killed by {name}", "", from_user=False)
    if failures:
        return failures[0]
    rank, process = error.get_first_failure()
    return RankFailure(rank, time.time(), f"exit code {process.exitcode}", str(process.message), from_user=False)
