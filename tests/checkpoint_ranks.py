"""What tests of checkpoints run on real ranks; importable by name, since the fork server's children unpickle it."""

import random
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from checkpoint_kills import read_checkpoint
from ranks import CPU
from torch import Tensor

from sparse2d.checkpoint.checkpointer import Checkpointer
from sparse2d.checkpoint.contents import _replicated_moments, table_iterations
from sparse2d.checkpoint.folder import checkpoints_in
from sparse2d.checkpoint.local_state import seed_rng
from sparse2d.checkpoint.writer import CheckpointWriter
from sparse2d.config import TrainConfig
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.engine import build_engine
from sparse2d.loop import Window, first_batch
from sparse2d.mesh import Mesh, process_group
from sparse2d.parallel.tables import gather_tables, local_shards


@dataclass(frozen=True)
class CheckpointedRun:
    """A short training between checkpoints: resume from ``folder`` or ``config.checkpoint.resume``, stop, save there.

    ``after`` draws one number from each generator on every rank, after all steps.
    """

    config: TrainConfig
    folder: Path
    stop: int


@dataclass(frozen=True)
class CheckpointedResult:
    resumed_step: int
    points: list[dict]
    # Of each group: whole tables, and whole moments, each spread to [rows, dim].
    tables: list[dict[str, Tensor]]
    moments: list[list[dict[str, Tensor]]]
    dense: dict[str, Tensor]
    dense_moments: dict[str, Tensor]
    iterations: dict[str, int]
    draws: list[tuple[float, float, float]]
    window: list[dict]


def train_with_checkpoints(runs: list[CheckpointedRun], dataset: Path) -> list[CheckpointedResult]:
    """One run after the other on the same ranks."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        return [_train_with_checkpoints(run, dataset, rank) for run in runs]


def _train_with_checkpoints(run, dataset, rank) -> CheckpointedResult:
    rows = open_dataset(dataset)
    config = run.config
    engine = build_engine(config, rows, rank, CPU)
    seed_rng(0, rank.rank)
    points = []
    with Checkpointer(config, engine, rank, run.folder, "f" * 16, rows.digest) as checkpointer:
        resumed = checkpointer.resume(lambda: engine.rehearse(first_batch(engine, config, rows, rank)))
        window, loss_last = Window(rank, resumed.window), resumed.loss_last
        size = config.global_batch_size
        batches = train_batches(rows, size, rank.rank, rank.world_size, resumed.step, run.stop)
        for step, batch in enumerate(batches, start=resumed.step + 1):
            random.random(), np.random.normal(), torch.rand(1)
            loss = engine.train_step(to_torchrec(batch, CPU), step)
            window.add(step, loss, float(batch.labels.sum()), len(batch.labels))
            if step % config.log_every == 0:
                points.append({"step": step} | window.reduce())
                loss_last = points[-1]["loss"]
            checkpointer.poll()
            if checkpointer.is_due(step):
                checkpointer.save(step, window.state_dict(), loss_last, waits=False)
    return _checkpointed_result(config, engine, resumed.step, points, window, rank)


def _dense_moments(engine) -> dict[str, Tensor]:
    """What the dense part's optimizer keeps, counters included, by parameter and name."""
    (dense,) = (keyed for name, keyed in engine.optimizer.optimizers if name == "dense")
    states = dense.state_dict()["state"]
    return {f"{param}/{name}": value.clone() for param, state in states.items() for name, value in state.items()}


def _checkpointed_result(config, engine, resumed_step, points, window, rank) -> CheckpointedResult:
    replicated = _replicated_moments(engine)
    parts = []
    for shard in local_shards(engine.model):
        moments = shard.moments or replicated.get(shard.table, ())
        parts.append((shard.table, shard.row, shard.column, shard.weight.clone(), [m.clone() for m in moments]))
    everyone: list = [None] * rank.world_size
    torch.distributed.all_gather_object(everyone, parts)
    draws: list = [None] * rank.world_size
    torch.distributed.all_gather_object(draws, (random.random(), float(np.random.normal()), torch.rand(1).item()))
    windows: list = [None] * rank.world_size
    torch.distributed.all_gather_object(windows, window.state_dict())
    mesh = Mesh(rank.world_size, config.parallelism.num_groups, config.parallelism.replicas)
    wholes = [_whole([part for member in group for part in everyone[member]], engine) for group in mesh.groups]
    return CheckpointedResult(
        resumed_step=resumed_step,
        points=points,
        tables=[tables for tables, _ in wholes],
        moments=[moments for _, moments in wholes],
        dense={
            name.replace("module.", ""): value.detach().clone()
            for name, value in engine.model.named_parameters()
            if "embedding_bags" not in name
        },
        dense_moments=_dense_moments(engine),
        iterations={name: int(count) for name, count in table_iterations(engine).items()},
        draws=draws,
        window=windows,
    )


def _whole(parts, engine):
    """Whole tables of one group, and its moments."""
    tables: dict[str, Tensor] = {}
    moments: list[dict[str, Tensor]] = []
    for table, row, column, weight, shard_moments in parts:
        spread = [moment.reshape(len(weight), -1).expand_as(weight) for moment in shard_moments]
        while len(moments) < len(spread):
            moments.append({})
        for whole, part in [(tables, weight), *zip(moments, spread, strict=False)]:
            target = whole.setdefault(table, torch.full(engine.table_shapes[table], float("nan")))
            target[row : row + weight.shape[0], column : column + weight.shape[1]] = part
    return tables, moments


def count_steps_beside_a_save(config: TrainConfig, folder: Path, dataset: Path) -> tuple[int, bool]:
    """Steps done while a save is held up, and whether what it then writes is of its own step."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        engine = build_engine(config, rows, rank, CPU)
        held = threading.Event()
        write_data = CheckpointWriter.write_data
        # Not a stand-in: the real writer, but later.
        CheckpointWriter.write_data = lambda *args: (held.wait(), write_data(*args))[1]
        with Checkpointer(config, engine, rank, folder, "f" * 16, rows.digest) as checkpointer:
            batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=7)
            for step, batch in enumerate(batches, start=1):
                engine.train_step(to_torchrec(batch, CPU), step)
                checkpointer.poll()
                if step == 2:
                    at_save = gather_tables(engine.model, engine.table_shapes)
                    checkpointer.save(step, {}, None, waits=False)
                    assert not checkpoints_in(folder)
            steps = step - 2 if not checkpoints_in(folder) else 0
            held.set()
        torch.distributed.barrier()
        written = read_checkpoint(folder) if rank.is_first else {}
        torch.distributed.barrier()
        return steps, all(torch.equal(written[f"tables/{name}/weight"], at_save[name]) for name in at_save if written)
