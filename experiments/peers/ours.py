"""``sparse2d.train`` as it is, with the benchmark's clock on its model.

torchrun --nproc-per-node 2 ours.py option=value ... (see bench.py)
"""

from functools import wraps
from typing import Any

from common import Clock

from sparse2d import loop
from sparse2d.cli import run_entry_point
from sparse2d.config import TrainConfig
from sparse2d.engine import Engine, build_engine
from sparse2d.train import main

clock = Clock()


@wraps(build_engine)
def build_watched(*args: Any, **kwargs: Any) -> Engine:
    """An engine whose steps are timed."""
    engine = build_engine(*args, **kwargs)
    clock.watch(engine.model)
    return engine


def train(config: TrainConfig) -> None:
    """Train, then write what a step took."""
    main(config)
    clock.write()


if __name__ == "__main__":
    loop.build_engine = build_watched  # type: ignore[attr-defined]
    run_entry_point("train", TrainConfig, train)
