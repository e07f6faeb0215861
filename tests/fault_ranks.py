"""What tests of faults run on real ranks; importable by name, since the fork server's children unpickle it."""

import os
import signal
from pathlib import Path

import torch
from ranks import CPU
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sparse2d.checkpoint.checkpointer import Checkpointer
from sparse2d.checkpoint.writer import CheckpointWriter
from sparse2d.config import TrainConfig
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.engine import build_engine
from sparse2d.errors import UserError
from sparse2d.mesh import process_group
from sparse2d.parallel.tables import gather_tables
from sparse2d.sync.averaging import ReplicaAverager

KILL_PHASES = ("lookup", "averaging", "save")


def _cut(batch: Batch, rows: int, with_ids: bool = True) -> Batch:
    """The first rows of a batch, or the same without any ids."""
    keys = batch.sparse_features.keys()
    lengths = batch.sparse_features.lengths().view(len(keys), -1)[:, :rows] * with_ids
    ids = batch.sparse_features.values().view(len(keys), -1)[:, :rows].reshape(-1)[: int(lengths.sum())]
    features = KeyedJaggedTensor(keys, ids, lengths=lengths.reshape(-1))
    return Batch(batch.dense_features[:rows], features, batch.labels[:rows])


def odd_batches(
    config: TrainConfig, sizes: tuple[int, ...], dataset: Path
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """A step on ``sizes`` rows per rank, one where a rank has no ids, one where none has any.

    Returns pooled embeddings without ids, the tables after the second step and those before the first.
    """
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        engine = build_engine(config, rows, rank, CPU)
        before = gather_tables(engine.model, engine.table_shapes)
        batches = [to_torchrec(b, CPU) for b in train_batches(rows, 60, rank.rank, rank.world_size, max_steps=3)]
        engine.train_step(_cut(batches[0], sizes[rank.rank]), 1)
        engine.train_step(_cut(batches[1], 15, with_ids=rank.rank != 1), 2)
        tables = gather_tables(engine.model, engine.table_shapes)
        (collection,) = (m for m in engine.model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        pooled = collection(_cut(batches[2], 15, with_ids=False).sparse_features).wait().values()
        engine.train_step(_cut(batches[2], 15, with_ids=False), 3)
        return pooled.detach(), tables, before


def killed_in(config: TrainConfig, phase: str, folder: Path, dataset: Path) -> None:
    """Rank 2 is killed in a phase of its third step."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        engine = build_engine(config, rows, rank, CPU)
        with Checkpointer(config, engine, rank, folder, "f" * 16, rows.digest) as checkpointer:
            for step, batch in enumerate(train_batches(rows, 60, rank.rank, rank.world_size), start=1):
                if step == 3 and rank.rank == 2:
                    _arm(phase, engine.model)
                engine.train_step(to_torchrec(batch, CPU), step)
                checkpointer.poll()
                checkpointer.save(step, {}, None, waits=False)


def _arm(phase: str, model: torch.nn.Module) -> None:
    """Kill this process when it comes to the phase."""

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "lookup":
        (collection,) = (m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))
        collection.register_forward_pre_hook(kill)
    elif phase == "averaging":
        ReplicaAverager.average = kill
    else:
        CheckpointWriter.write_data = kill


def fail_until(folder: Path, attempts: int) -> int:
    """Fail on rank 0 until the ranks have been started again so often; a collective shows that they can meet anew."""
    with process_group(CPU) as rank:
        torch.distributed.barrier()
        if rank.rank == 0 and rank.restart_count < attempts:
            raise KeyError(f"attempt {rank.restart_count}")
        torch.distributed.barrier()
        return rank.restart_count


def fail_as_user(folder: Path) -> None:
    """An error of the user's; another attempt would say another number."""
    with process_group(CPU) as rank:
        raise UserError(f"attempt {rank.restart_count} is the user's")
