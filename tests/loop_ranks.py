"""What tests of the training loop run on real ranks; importable by name: the fork server's children unpickle it."""

import time
from pathlib import Path
from unittest import mock

import torch

from sparse2d import loop
from sparse2d.checkpoint.checkpointer import Checkpointer
from sparse2d.config import TrainConfig
from sparse2d.data.dataset import open_dataset
from sparse2d.errors import UserError
from sparse2d.loop import Job, Window, run_rank
from sparse2d.mesh import process_group

PAUSE_S = 0.5


def windows() -> tuple[dict, str, str]:
    """Rank 0's view: a window whose labels are all of one kind, and what all ranks say of a loss that only one has.

    Rank 2's loss is no number at step 13, the third of its window; then also found without a reduction.
    """
    with process_group(torch.device("cpu")) as rank:
        window = Window(rank)
        for step in (9, 10):
            window.add(step, torch.tensor(0.5 + rank.rank), positives=0.0, rows=4)
        alike = window.reduce()
        said = []
        for look in (window.refuse_non_finite, window.reduce):
            for step in (11, 12, 13):
                loss = torch.nan if (rank.rank, step) == (2, 13) else 1.0
                window.add(step, torch.tensor(loss), positives=1.0, rows=4)
            try:
                look()
            except UserError as error:
                said.append(str(error))
            window = Window(rank)
        everyone: list = [None] * rank.world_size
        torch.distributed.all_gather_object(everyone, said)
        assert all(of_rank == said for of_rank in everyone)
        return alike, *said


def with_slow_pauses(config: TrainConfig, dataset: Path, run_dir: Path) -> dict:
    """The record of a run, half a second slower in each evaluation and in each save."""
    evaluate, save = loop.evaluate, Checkpointer.save

    def slow_evaluate(*args, **kwargs):
        time.sleep(PAUSE_S)
        return evaluate(*args, **kwargs)

    def slow_save(*args, **kwargs):
        time.sleep(PAUSE_S)
        return save(*args, **kwargs)

    digest = open_dataset(dataset).digest
    run_dir.mkdir(exist_ok=True)
    with mock.patch.object(loop, "evaluate", slow_evaluate), mock.patch.object(Checkpointer, "save", slow_save):
        return run_rank(Job(config, dataset, run_dir, digest[:16], time.time()))
