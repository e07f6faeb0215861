"""Starts ranks on this machine from a warm fork server and names the root cause when one fails.

``start_method="spawn"`` would make each rank import TorchRec for itself (80 s for 8 ranks on 2 cores); the fork
server imports it once and lives as long as this process, so a sweep pays for it once.
"""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, cast

from filelock import FileLock, Timeout

from sparse2d.data.atomic import replacing
from sparse2d.errors import UserError
from sparse2d.mesh import RankInfo, rank_from_env
from sparse2d.preemption import STOP_FILE, PreemptedError, terminate

T = TypeVar("T")

# gloo's and NCCL's errors on the surviving ranks are consequences, never the cause.
PEER_LOSS = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "[gloo]",
    "Gloo connectFullMesh",
    "NCCL",
    "DistBackendError",
)
# How long a rank has to close its files once it is told to end.
SHUTDOWN_S = 5
# How long a rank that lost its peer waits, so that the launcher first sees the peer that failed.
CONSEQUENCE_DELAY_S = 2
SCRATCH_PREFIX = "sparse2d-ranks-"
ABANDONED_S = 60


@dataclass(frozen=True)
class RankFailure:
    """Why one rank ended."""

    rank: int
    time: float
    error: str
    traceback: str
    from_user: bool
    # How often the ranks had been started again.
    attempt: int = 0

    @classmethod
    def of(cls, error: BaseException, rank: int, attempt: int) -> "RankFailure":
        """What is worth knowing of an exception."""
        from_user = isinstance(error, UserError)
        return cls(
            rank=rank,
            time=time.time(),
            error=str(error) if from_user else f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
            from_user=from_user,
            attempt=attempt,
        )

    def write(self, folder: Path) -> None:
        """Leave it in a folder for whoever tells the story."""
        with replacing(folder / f"failure-{self.attempt}-{self.rank}.json") as temporary:
            temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only lost a peer that had failed before."""
        return any(mark in self.error for mark in PEER_LOSS)

    @property
    def is_interruption(self) -> bool:
        """Whether the rank was told to end."""
        return self.error.startswith(("SystemExit", "PreemptedError", "KeyboardInterrupt"))


class RanksFailedError(RuntimeError):
    """At least one rank failed; the text names the root cause and its rank."""

    def __init__(self, cause: RankFailure) -> None:
        super().__init__(f"rank {cause.rank}: {cause.error}")
        self.cause = cause

    def __reduce__(self) -> tuple[type, tuple[RankFailure]]:
        """A cluster's job hands it back in a pickle."""
        return RanksFailedError, (self.cause,)


def run_ranks(
    fn: Callable[..., T], *args: Any, num_ranks: int, max_restarts: int = 0, grace_s: float | None = None
) -> T:
    """Run ``fn(*args)`` on ``num_ranks`` new ranks of this machine and return rank 0's result.

    ``fn`` and ``args`` must be picklable. Ranks find themselves through RANK/WORLD_SIZE (see ``mesh.py``).

    Args:
        fn: what each rank calls.
        args: its arguments.
        num_ranks: T.
        max_restarts: how often all ranks are started again after one has failed, unless by a ``UserError``.
        grace_s: seconds in which ranks may end in order once this process gets SIGTERM; None = they end at once.

    Raises:
        UserError: if the first failure was one, with its rank.
        RanksFailedError: on any other failure; all ranks are gone when it is raised.
        PreemptedError: if the ranks were told to end and did so in order.
    """
    # Heavy; an entry point that only prints help must not pay for it.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    start_fork_server()
    # The agent and the process pool report each lost rank in a dozen lines; the root cause is told here, once.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _scratch_folder() as scratch:
        try:
            with _graceful_sigterm(scratch, grace_s):
                launch = elastic_launch(_elastic_config(num_ranks, max_restarts, scratch), _rank_main)
                results: dict[int, T] = launch(fn, args, str(scratch))
        except ChildFailedError as error:
            cause = _root_cause(scratch, error, max_restarts)
            if cause.from_user:
                raise UserError(cause.error) from None
            raise RanksFailedError(cause) from None
    if isinstance(results[0], PreemptedError):
        raise results[0]
    return results[0]


def _elastic_config(num_ranks: int, max_restarts: int, scratch: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        start_method="forkserver",
        # SIGINT and SIGTERM stay our own exceptions (KeyboardInterrupt, SystemExit), upon which the agent ends the
        # ranks with SIGTERM; its handlers would pass on the SIGINT, which ranks ignore.
        signals_to_handle="SIGQUIT",
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )


@contextmanager
def _graceful_sigterm(scratch: Path, grace_s: float | None) -> Iterator[None]:
    """The first SIGTERM asks the ranks to end, the second, or the end of the grace period, ends them."""
    if grace_s is None:
        yield
        return
    timer = threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True

    def ask(*_: Any) -> None:
        signal.signal(signal.SIGTERM, terminate)
        (scratch / "stop").touch()
        timer.start()

    previous = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder for the time of the block; those of launchers that were killed go, too."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*"):
        # Another launcher's, maybe, that is just about to take its lock; or another user's.
        with suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                with FileLock(folder / ".lock", timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as scratch, FileLock(Path(scratch, ".lock")):
        yield Path(scratch)


def start_fork_server() -> None:
    """Start the fork server unless it runs, without waiting for what it imports: called early, that costs no time.

    Ctrl-C, which reaches the whole terminal group, is not its business.
    """
    # gloo announces each connection on stderr.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    multiprocessing.set_forkserver_preload(["sparse2d.preload"])
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
    os.environ[STOP_FILE] = str(Path(scratch, "stop"))
    rank = rank_from_env()
    assert rank is not None
    try:
        _refuse_to_repeat(Path(scratch))
        return fn(*args)
    except PreemptedError as end:
        # A result and no failure, or the agent would start the ranks again.
        return cast(T, end)
    except Exception as error:
        failure = RankFailure.of(error, rank.rank, rank.restart_count)
        failure.write(Path(scratch))
        if failure.is_consequence:
            time.sleep(CONSEQUENCE_DELAY_S)
        # The launcher tells the story once; eight tracebacks would bury it.
        sys.exit(1)


def _refuse_to_repeat(scratch: Path) -> None:
    """Raise what ended an earlier attempt if it was an error of the user's: it would come again."""
    for failure in read_failures(scratch):
        if failure.from_user:
            raise UserError(failure.error)


def read_failures(folder: Path) -> list[RankFailure]:
    """What ranks left there, the earliest first."""
    failures = [RankFailure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("failure-*.json")]
    return sorted(failures, key=lambda failure: failure.time)


def cause_among_ranks(folder: Path, error: BaseException, rank: RankInfo) -> RankFailure | None:
    """The root cause of a failure under another launcher, from what all ranks leave in a shared folder.

    A rank that leaves nothing while its peers fail was killed.

    Args:
        folder: of the run.
        error: what ended this rank.
        rank: this one.

    Returns:
        The cause on the first rank that is still there to record it, None on all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = RankFailure.of(error, rank.rank, rank.restart_count)
    own.write(folder)
    deadline = time.monotonic() + CONSEQUENCE_DELAY_S
    while True:
        failures = [failure for failure in read_failures(folder) if failure.attempt == rank.restart_count]
        silent = sorted(set(range(rank.world_size)) - {failure.rank for failure in failures})
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if rank.rank != min(failure.rank for failure in failures):
        return None
    for failure in failures:
        if not failure.is_consequence and not failure.is_interruption:
            return failure
    if silent:
        return RankFailure(silent[0], time.time(), "killed, it left no word", "", from_user=False)
    return failures[0]


def _end_with_launcher() -> None:
    """End this rank when the launcher is gone (killed by SIGKILL, say): nobody else would."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_S)
    os._exit(1)


def _root_cause(scratch: Path, error: Any, attempt: int) -> RankFailure:
    """The earliest failure that is not just the loss of a peer, else a rank that a signal killed, else the earliest."""
    failures = [failure for failure in read_failures(scratch) if failure.attempt == attempt]
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
