"""``python -m sparse2d.train``: train and evaluate one configuration, or a sweep of them with ``-m``."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from sparse2d.checkpoint.folder import candidates_at, checkpoints_in, refuse_beyond, step_of
from sparse2d.cli import run_entry_point
from sparse2d.compression.compressor import savings
from sparse2d.config import Combine, EngineKind, TrainConfig, check_train, settle
from sparse2d.data.dataset import Dataset, num_train_steps, open_dataset
from sparse2d.data.prepare import known_table_rows, prepare
from sparse2d.data.verify import refuse_unsound
from sparse2d.environment import check_device, check_environment
from sparse2d.errors import UserError
from sparse2d.footprint import check_memory
from sparse2d.job import Job, run_job
from sparse2d.launch import SHUTDOWN_S, RanksFailedError, cause_among_ranks, run_ranks, start_fork_server
from sparse2d.mesh import RankInfo, rank_from_env
from sparse2d.plan import read_plan
from sparse2d.preemption import PreemptedError
from sparse2d.records import RunDirectory
from sparse2d.timing import phases_told

log = logging.getLogger("sparse2d.train")

# Arrays up to this size are verified before each run (a second); `sparse2d.preprocess check=true` verifies any.
VERIFIED_BYTES = 1 << 30


def main(config: TrainConfig) -> str | None:
    """Run one configuration, unless a finished run of it is there already; returns the run's folder."""
    rank = rank_from_env()
    if rank is not None:
        if config.engine is EngineKind.emulated:
            raise UserError("engine=emulated is one process that stands for all ranks; start it without torchrun")
        _refuse_another_world(config, rank.world_size)
        config.launch.num_ranks = rank.world_size
    if config.rank_batch_size is not None:
        config.global_batch_size = config.rank_batch_size * config.launch.num_ranks
    is_first = rank is None or rank.is_first
    if not is_first:
        # Of what each rank finds alike, one speaks.
        logging.getLogger("sparse2d").setLevel(logging.ERROR)
    check_train(config)
    is_auto = config.sync.combine is Combine.auto
    settle(config)
    if is_first and is_auto and config.parallelism.num_groups > 1:
        told = (config.sync.combine.name, config.sync.interval, config.optimizer.name.name)
        log.info("replicas are merged by %s, every %d steps (sync.combine=auto, optimizer=%s)", *told)
    if config.engine is EngineKind.emulated and config.checkpoint.interval is not None:
        # Not an error: launch=slurm asks for them on behalf of all runs.
        log.info("engine=emulated writes no checkpoints: a run that is stopped starts anew")
        config.checkpoint.interval = None
    pinned = config.parallelism.plan_file
    # Read before the data: a damaged file is told at once.
    plan = read_plan(Path(pinned)) if pinned is not None else None
    if config.plan_only:
        if is_first:
            _plan_only(config)
        return None
    if (resumed := config.checkpoint.resume_path) is not None:
        candidates_at(resumed)
    dataset = _dataset(config, show_progress=is_first)
    run = RunDirectory(config, dataset.digest, None if plan is None else plan.digest)
    if not config.rerun and (record := run.completed_record()) is not None:
        if is_first:
            log.info("already finished (rerun=true runs it again): %s", _outcome(record, run.path))
        return str(run.path)
    if resumed is not None and (config.rerun or not checkpoints_in(run.checkpoints)):
        refuse_beyond(resumed, num_train_steps(dataset, config.global_batch_size, config.max_steps))
    if rank is None:
        start_fork_server()
    check_environment()
    check_device(config.launch.device)
    if is_first:
        check_memory(config, dataset.num_embeddings, config.launch.num_ranks if rank is None else rank.local_world_size)
    if pinned is not None:
        from sparse2d.planning import plan_here

        plan_here(config, dataset.num_embeddings)
    if is_first:
        run.begin(is_restart=rank is not None and rank.restart_count > 0)
    try:
        results = _run(config, dataset, run)
    except BaseException as error:
        if rank is None:
            _record_failure(run, error)
        else:
            _record_failure_of_ranks(run, error, rank)
        error.add_note(str(run.path))
        raise
    if is_first:
        log.info(_outcome(run.finish("completed", None, results), run.path))
        for line in (phases_told(results["train"]), savings(results["comms"])):
            if line is not None:
                log.info(line)
    return str(run.path)


def _refuse_another_world(config: TrainConfig, world_size: int) -> None:
    """Under torchrun the world is torchrun's; a default or an experiment's number gives way, the user's must be it."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    asked = any(override.lstrip("+").startswith("launch.num_ranks=") for override in overrides)
    if asked and config.launch.num_ranks != world_size:
        raise UserError(
            f"launch.num_ranks={config.launch.num_ranks}, but torchrun has started {world_size} ranks; leave it out or "
            "have torchrun start so many"
        )


def _plan_only(config: TrainConfig) -> None:
    """Print and write the plan; data is read only where the tables' sizes depend on it."""
    num_embeddings = known_table_rows(config.data) or _dataset(config, show_progress=True).num_embeddings
    check_environment()
    # Imports TorchRec.
    from sparse2d.planning import plan_only

    plan_only(config, num_embeddings)


def _dataset(config: TrainConfig, show_progress: bool) -> Dataset:
    """Prepare the rows if need be and check that they suffice."""
    path = prepare(config.data, progress=show_progress)
    refuse_unsound(path, VERIFIED_BYTES)
    dataset = open_dataset(path, config.data.train_rows, config.data.eval_rows)
    if num_train_steps(dataset, config.global_batch_size) == 0:
        raise UserError(
            f"{len(dataset.train)} training rows fill no batch of global_batch_size={config.global_batch_size}; "
            "lower it"
        )
    return dataset


def _run(config: TrainConfig, dataset: Dataset, run: RunDirectory) -> dict[str, Any]:
    """The measured parts of the record, from ranks started here or, under torchrun, as one of them."""
    job = Job(config, dataset.path.resolve(), run.path.resolve(), run.fingerprint, time.time())
    if rank_from_env() is not None:
        return run_job(job)
    saves = config.checkpoint.interval is not None
    return run_ranks(
        run_job,
        job,
        num_ranks=config.launch.num_ranks // config.ranks_per_process,
        max_restarts=config.launch.max_restarts,
        grace_s=config.checkpoint.grace_s if saves else None,
    )


def _record_failure(run: RunDirectory, error: BaseException) -> None:
    """Leave a record that says what happened; the exception goes on."""
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if interrupted:
        text = text if isinstance(error, PreemptedError) else _stopped(run)
        log.info(text)
    try:
        run.finish("interrupted" if interrupted else "failed", text, {})
        if isinstance(error, RanksFailedError) and error.cause.traceback:
            with (run.path / "run.log").open("a") as file:
                file.write(f"rank {error.cause.rank}:\n{error.cause.traceback}\n")
    except (UserError, OSError) as refused:
        # What ended the run, maybe a full disk, is told after this.
        log.error("no record could be written: %s", refused)


def _stopped(run: RunDirectory) -> str:
    """Where a run that was stopped goes on."""
    if saved := checkpoints_in(run.checkpoints):
        return f"stopped; the same command goes on from step {step_of(saved[0])}, the last one saved: {saved[0]}"
    return "stopped, and no step was saved (checkpoint.interval has steps saved); this run starts anew"


def _record_failure_of_ranks(run: RunDirectory, error: BaseException, rank: RankInfo) -> None:
    """Under torchrun, which knows nothing of records: the ranks find out together what happened first."""
    # A rank that is told to end because a peer has failed still has a story to tell.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A save in the background may wait for a rank that is gone, and the end of this process for that save.
    leave = threading.Timer(SHUTDOWN_S, os._exit, (error.code if isinstance(error, PreemptedError) else 1,))
    leave.daemon = True
    leave.start()
    try:
        cause = cause_among_ranks(run.failures, error, rank)
    except OSError:
        # Nothing can be written there: each rank tells its own error.
        return
    if cause is None:
        return
    _record_failure(run, error if cause.is_interruption else RanksFailedError(cause))


def _outcome(record: dict[str, Any], path: Path) -> str:
    def shown(value: float | None, digits: str) -> str:
        return "undefined" if value is None else format(value, digits)

    figures = record["eval"]
    # What one process that stands for all ranks does in a second says nothing of theirs.
    speed = "" if record["provenance"] == "emulated" else f", {shown(record['train']['qps'], '.0f')} QPS"
    return f"NE {shown(figures['ne'], '.4f')}, AUC {shown(figures['auc'], '.4f')}{speed} -> {path}"


if __name__ == "__main__":
    run_entry_point("train", TrainConfig, main)
