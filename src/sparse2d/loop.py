"""What each rank does: build, train one pass, evaluate, and hand the measured parts of the record to the launcher."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy.special import logit
from torchrec.datasets.utils import Batch

from sparse2d.checkpoint.checkpointer import Checkpointer, Resumed
from sparse2d.checkpoint.folder import refuse_beyond
from sparse2d.checkpoint.local_state import seed_rng
from sparse2d.config import Device, EngineKind, Pipeline, Timing, TrainConfig
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import (
    Dataset,
    dropped_rows,
    eval_batches,
    num_train_steps,
    open_dataset,
    prefetch,
    train_batches,
)
from sparse2d.engine import Engine, build_engine
from sparse2d.errors import UserError, refusals_told
from sparse2d.frequency import SeenCounts, scores_by_count
from sparse2d.job import Job
from sparse2d.measuring import Measuring
from sparse2d.mesh import RankInfo, process_group, rank_from_env
from sparse2d.metrics import Metrics, evaluate_logits, normalized_entropy
from sparse2d.pipeline import TrainSteps
from sparse2d.preemption import PreemptedError, StopRequest
from sparse2d.records import forget_peak_rss, peak_rss_bytes, plain
from sparse2d.runlog import RunLog, configure_rank_logging

log = logging.getLogger(__name__)

WARMUP_STEPS = 10
# Of a rank, that its loader thread hands over together.
PREFETCHED_ROWS = 8192


def run_rank(job: Job) -> dict[str, Any]:
    """Run a job on this rank; every rank returns, rank 0's result is complete.

    Raises:
        UserError: for an id out of range, a loss that is not finite, or a device that is not there.
    """
    config = job.config
    rank = rank_from_env()
    assert rank is not None
    configure_rank_logging(job.run_dir, rank.is_first)
    torch.set_num_threads(config.launch.threads_per_rank)
    forget_peak_rss()
    device = choose_device(config.launch.device, rank)
    dataset = open_dataset(job.dataset, config.data.train_rows, config.data.eval_rows, config.data.multi_hot)
    with process_group(device), refusals_told(config.results_dir), ExitStack() as stack:
        engine = build_engine(config, dataset, rank, device)
        seed_rng(config.seed, rank.rank)
        startup_s = time.time() - job.launched_at
        log.info("%s ready after %.1f s%s", _ranks(config, rank), startup_s, _attempt(rank))
        log.info("data: %s, digest %s", dataset.name, dataset.digest[:12])
        checkpointer = stack.enter_context(
            Checkpointer(config, engine, rank, job.run_dir / "checkpoints", job.fingerprint, dataset.digest)
        )
        resumed = checkpointer.resume(lambda: engine.rehearse(first_batch(engine, config, dataset, rank)))
        run_log = stack.enter_context(
            RunLog(config, job.run_dir, job.fingerprint, dataset.digest, rank.is_first, resumed.step)
        )
        run_log.show_plan(engine.placement)
        measuring = stack.enter_context(Measuring(engine, config, job.run_dir / "trace"))
        train_results = train(engine, config, dataset, rank, run_log, checkpointer, resumed, measuring)
        scores = evaluate(engine, config, dataset, rank)
        metrics = scores.model
        results = {
            "data": {
                "name": dataset.name,
                "digest": dataset.digest,
                "train_rows": train_results["rows"],
                "eval_rows": len(dataset.eval),
                "base_rate": dataset.base_rate,
            },
            "eval": asdict(metrics),
            "eval_constant": asdict(scores.constant),
            **({} if scores.by_count is None else {"eval_by_count": scores.by_count}),
            "train": train_results | {"startup_s": startup_s},
            "plan": engine.plan.as_record(),
            "comms": measuring.comms_record(),
            "memory": {"peak_rss_bytes": int(_over_ranks(peak_rss_bytes(), dist.ReduceOp.MAX))} | _cuda_memory(device),
        }
        run_log.log({"step": train_results["steps"]} | _eval_point(metrics))
        run_log.summarise(results)
        checkpointer.keep_only_newest()
    return {key: plain(value) for key, value in results.items()}


def _ranks(config: TrainConfig, rank: RankInfo) -> str:
    if config.engine is EngineKind.emulated:
        return f"one process that emulates {config.launch.num_ranks} ranks"
    return "1 rank" if rank.world_size == 1 else f"{rank.world_size} ranks"


def _attempt(rank: RankInfo) -> str:
    return f", started again for the {rank.restart_count}. time" if rank.restart_count else ""


def choose_device(wanted: Device, rank: RankInfo) -> torch.device:
    """This rank's device.

    Raises:
        UserError: if CUDA is asked for and there are fewer GPUs than local ranks.
    """
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= rank.local_world_size
    if wanted is Device.cuda and not enough:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UserError(
            f"launch.device=cuda needs a GPU for each of the {rank.local_world_size} ranks of a host; found {gpus}"
        )
    if wanted is Device.cpu or not enough:
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    return device


def train(
    engine: Engine,
    config: TrainConfig,
    dataset: Dataset,
    rank: RankInfo,
    run_log: RunLog,
    checkpointer: Checkpointer,
    resumed: Resumed,
    measuring: Measuring,
) -> dict[str, Any]:
    """The rest of one pass over the training rows in time order; returns the record's ``train`` part.

    Raises:
        PreemptedError: if the ranks were told to end; there is a checkpoint of the last step, then.
    """
    batch_size, total = config.global_batch_size, num_train_steps(dataset, config.global_batch_size)
    steps = num_train_steps(dataset, batch_size, config.max_steps)
    if dropped := dropped_rows(dataset, batch_size):
        log.info("the last %d training rows fill no batch of %d and are dropped", dropped, batch_size)
    if (config.max_steps or 0) > total:
        log.info("max_steps=%d is more than one pass: the training rows fill %d steps", config.max_steps, total)
    if resumed.path is not None:
        refuse_beyond(resumed.path, steps)
    if resumed.step == steps:
        log.info("%s is of the last of %d steps: nothing is left to train, only to evaluate", resumed.path, steps)
    warmup_steps = min(WARMUP_STEPS, (steps - resumed.step) // 2)
    window = Window(rank, resumed.window)
    seed = config.data.shuffle_seed
    batches = prefetch(
        train_batches(dataset, batch_size, rank.rank, rank.world_size, resumed.step, steps, shuffle_seed=seed),
        together=max(1, PREFETCHED_ROWS * rank.world_size // batch_size),
    )
    # Phases of overlapping steps could not be told apart.
    train_steps = TrainSteps(engine, batches, Pipeline.none if config.timing is Timing.phases else config.pipeline)
    measuring.begin(train_steps, warmup_steps)
    loss_last = resumed.loss_last
    engine.model.train()
    run_log.start_training(steps)
    with _stop_request(checkpointer) as stop:
        for step in range(resumed.step + 1, steps + 1):
            with measuring.step(batch_size):
                loss, labels = train_steps.train(step)
            window.add(step, loss, float(labels.sum()), len(labels))
            run_log.advance()
            if step % config.log_every == 0 or step == steps:
                point = window.reduce()
                loss_last = point["loss"]
                run_log.log({"step": step, "rows": step * batch_size} | point | measuring.point())
            if config.eval_every is not None and step % config.eval_every == 0 and step < steps:
                train_steps.pause()
                # With its rows, as points of training have: a resumed run keeps it.
                scores = evaluate(engine, config, dataset, rank)
                run_log.log({"step": step, "rows": step * batch_size} | _eval_point(scores.model))
            checkpointer.poll()
            ends = stop is not None and stop.agreed()
            if ends or step == steps or checkpointer.is_due(step):
                # A run must not go on from weights that are no numbers.
                window.refuse_non_finite()
                checkpointer.save(step, window.state_dict(), loss_last, waits=ends or step == steps)
            if ends:
                raise PreemptedError(f"stopped after step {step} of {steps}; the same command goes on from there")
    train_steps.pause()
    return {
        "rows": steps * batch_size,
        "steps": steps,
        "resumed_step": resumed.step,
        "dropped_rows": dropped,
        "loss_last": loss_last,
        "warmup_steps": warmup_steps,
        "threads_per_rank": torch.get_num_threads(),
        "device": engine.device.type,
    } | measuring.train_record()


@contextmanager
def _stop_request(checkpointer: Checkpointer) -> Iterator[StopRequest | None]:
    """Ranks may be told to end between steps, if there are checkpoints to go on from."""
    if not checkpointer.is_on:
        yield None
        return
    stop = StopRequest()
    with stop.deferring_signals():
        yield stop
        stop.finish()


def first_batch(engine: Engine, config: TrainConfig, dataset: Dataset, rank: RankInfo) -> Batch:
    """This rank's rows of the first step."""
    batches = train_batches(dataset, config.global_batch_size, rank.rank, rank.world_size, max_steps=1)
    return to_torchrec(next(batches), engine.device)


class Window:
    """Loss and NE over the rows since the last logged point, each row scored before the model trained on it."""

    def __init__(self, rank: RankInfo, state: Mapping[str, Any] | None = None) -> None:
        self._rank = rank
        state = state or {}
        self._first_step: int | None = state.get("first_step")
        self._losses: list[torch.Tensor] = list(state.get("losses", ()))
        self._positives: float = state.get("positives", 0.0)
        self._rows: int = state.get("rows", 0)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to reduce to the same bits; empty right after a reduction."""
        if self._first_step is None:
            return {}
        return {
            "first_step": self._first_step,
            "losses": self._stacked(),
            "positives": self._positives,
            "rows": self._rows,
        }

    def _stacked(self) -> torch.Tensor:
        """All losses, on the device of the last one: those of a checkpoint come from the host."""
        device = self._losses[-1].device
        return torch.stack([loss.to(device) for loss in self._losses])

    def _clear(self) -> None:
        self._first_step, self._losses, self._positives, self._rows = None, [], 0.0, 0

    def add(self, step: int, loss: torch.Tensor, positives: float, rows: int) -> None:
        """Take this rank's mean loss over ``rows`` rows; it stays on the device until ``reduce``."""
        self._first_step = step if self._first_step is None else self._first_step
        self._losses.append(loss)
        self._positives += positives
        self._rows += rows

    def reduce(self) -> dict[str, float | None]:
        """Pool over the ranks and start anew; a collective.

        Raises:
            UserError: on every rank, if a loss was not finite, with the first such step and rank.
        """
        losses = self._stacked().double().cpu()
        # Every step has the same number of rows, so the mean over steps is the mean over rows.
        sums = [losses.mean().item() * self._rows, self._positives, float(self._rows)]
        *sums_of_ranks, bad = _of_ranks([*sums, self._first_non_finite(losses)]).T
        self._refuse(bad)
        loss_sum, positives, rows = (of_ranks.sum().item() for of_ranks in sums_of_ranks)
        loss = loss_sum / rows
        self._clear()
        return {"loss": loss, "ne": normalized_entropy(loss, positives / rows)}

    def refuse_non_finite(self) -> None:
        """Raise on every rank if a loss was not finite, with the first such step and rank; a collective."""
        if self._first_step is not None:
            self._refuse(_of_ranks([self._first_non_finite(self._stacked().cpu())])[:, 0])

    def _first_non_finite(self, losses: torch.Tensor) -> float:
        """Step of this rank's first loss that is not finite, or infinity."""
        assert self._first_step is not None
        (places,) = (~losses.isfinite()).nonzero(as_tuple=True)
        return float(self._first_step + int(places[0])) if len(places) else math.inf

    @staticmethod
    def _refuse(first_bad_steps: torch.Tensor) -> None:
        """Raise if a rank, of all [T], has a step to tell."""
        step, rank = first_bad_steps.min(0)
        if step.isfinite():
            raise UserError(
                f"the loss is not finite at step {int(step)} on rank {int(rank)}; "
                "lower optimizer.lr or optimizer.dense.lr"
            )


class Scores(NamedTuple):
    """Of the evaluation rows: complete on rank 0; other ranks get metrics over no rows.

    Attributes:
        model: the model's metrics.
        constant: those of a constant at the rows' base rate.
        by_count: the model's, by how often training saw a row's rarest id; None unless asked for.
    """

    model: Metrics
    constant: Metrics
    by_count: list[dict[str, Any]] | None


def evaluate(engine: Engine, config: TrainConfig, dataset: Dataset, rank: RankInfo) -> Scores:
    """Score the evaluation rows once."""
    logits, labels, counts = [], [], []
    batch_rows = config.eval_batch_size * config.ranks_per_process
    seen = _seen_in_training(config, dataset)
    with engine.evaluating():
        for batch in eval_batches(dataset, batch_rows, rank.rank, rank.world_size):
            predicted = engine.predict(to_torchrec(batch, engine.device))
            logits.append(predicted[: batch.num_rows].float().cpu().numpy())
            labels.append(batch.labels[: batch.num_rows])
            counts.append(np.zeros(batch.num_rows) if seen is None else seen.of_rarest_id(batch)[: batch.num_rows])
    own = np.stack([np.concatenate(logits), np.concatenate(labels), np.concatenate(counts)])
    pooled: list[Any] | None = [None] * rank.world_size if rank.is_first else None
    dist.gather_object(own, pooled)
    all_logits, all_labels, all_counts = np.concatenate(pooled, axis=1) if pooled else np.empty((3, 0))
    metrics = evaluate_logits(all_logits, all_labels)
    constant = np.full(len(all_labels), logit(all_labels.mean()) if len(all_labels) else 0.0)
    warn_if_useless(metrics)
    bounds = config.frequency_bins
    return Scores(
        metrics,
        evaluate_logits(np.clip(constant, -1e3, 1e3), all_labels),
        None if bounds is None else scores_by_count(all_logits, all_labels, all_counts, bounds),
    )


def warn_if_useless(metrics: Metrics) -> None:
    """Say so where a model is no better than one that looks at nothing."""
    if metrics.ne is not None and metrics.ne >= 1:
        log.warning("NE %.4f is no better than a constant predictor", metrics.ne)
    if metrics.auc is not None and abs(metrics.auc - 0.5) < 0.01:
        log.warning("AUC %.4f: the model tells clicks from non-clicks no better than chance", metrics.auc)


def _seen_in_training(config: TrainConfig, dataset: Dataset) -> SeenCounts | None:
    """Counts of the ids in the rows that this run trained on, if they are asked for."""
    if config.frequency_bins is None:
        return None
    seed = config.data.shuffle_seed
    rows = train_batches(dataset, config.global_batch_size, 0, 1, max_steps=config.max_steps, shuffle_seed=seed)
    return SeenCounts(dataset, rows)


def _eval_point(metrics: Metrics) -> dict[str, Any]:
    return {f"eval/{key}": value for key, value in asdict(metrics).items()}


def _cuda_memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {"peak_cuda_bytes": int(_over_ranks(torch.cuda.max_memory_allocated(device), dist.ReduceOp.MAX))}


def _of_ranks(values: list[float]) -> torch.Tensor:
    """Every rank's numbers, float64 [T, len(values)]; a collective."""
    own = torch.tensor(values, dtype=torch.float64)
    gathered = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(gathered, own)
    return gathered.view(-1, len(own))


def _over_ranks(value: float, op: Any) -> float:
    """Reduce one number over all ranks."""
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return float(tensor.item())
