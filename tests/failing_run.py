"""``python -m sparse2d.train`` whose rank 1 has a bug in step 3; a program, and importable by name in its ranks."""

import sparse2d.train
from sparse2d.cli import run_entry_point
from sparse2d.config import TrainConfig
from sparse2d.engine import Engine
from sparse2d.job import Job
from sparse2d.loop import run_rank
from sparse2d.mesh import rank_from_env


def run_rank_with_a_bug(job: Job) -> dict:
    train_step = Engine.train_step

    def train_step_with_a_bug(self, batch, step):
        if step == 3 and rank_from_env().rank == 1:
            raise IndexError("no such thing as step 3")
        return train_step(self, batch, step)

    Engine.train_step = train_step_with_a_bug
    return run_rank(job)


if __name__ == "__main__":
    import failing_run  # by that name its ranks find it

    sparse2d.train.run_job = failing_run.run_rank_with_a_bug
    run_entry_point("train", TrainConfig, sparse2d.train.main)
