"""What all peers are given: the same rows, the same sizes, one clock."""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

NUM_DENSE, NUM_SPARSE = 13, 26
FEATURES = [f"C{i + 1}" for i in range(NUM_SPARSE)]
# Folder where each rank leaves what it measured.
OUT = "PEERS_OUT"
# Wandb's own process takes some seconds to start, on cores that the ranks need.
WARMUP_STEPS = 300


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of a peer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder of day_0_{dense,sparse,labels}.npy")
    parser.add_argument("--table-rows", type=int, nargs=NUM_SPARSE, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows of all ranks a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--dense-arch", type=int, nargs="+", required=True)
    parser.add_argument("--over-arch", type=int, nargs="+", required=True)
    return parser.parse_args()


def tables(given: argparse.Namespace) -> list[EmbeddingBagConfig]:
    """One table for each feature."""
    return [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=given.dim, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(FEATURES, given.table_rows, strict=True)
    ]


def batches(given: argparse.Namespace, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's dense values [b, 13], ids [26, b] and labels [b] of each step, from arrays mapped into memory."""
    dense, sparse, labels = (np.load(given.data / f"day_0_{part}.npy", "r") for part in ("dense", "sparse", "labels"))
    size = given.batch // world_size
    for step in range(given.steps):
        start = step * given.batch + rank * size
        rows = slice(start, start + size)
        yield (
            torch.from_numpy(np.array(dense[rows])),
            torch.from_numpy(np.ascontiguousarray(sparse[rows].T)),
            torch.from_numpy(np.array(labels[rows], dtype=np.float32).reshape(-1)),
        )


class Clock:
    """Times whole steps, from one forward pass in training to the next: nothing that a loop does is left out."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._cpu_s: list[float] = []

    def watch(self, model: nn.Module) -> None:
        """Call before the first step."""
        model.register_forward_pre_hook(lambda module, _: self._tick() if module.training else None)

    def _tick(self) -> None:
        self._starts.append(time.perf_counter())
        self._cpu_s.append(time.process_time())

    def write(self) -> None:
        """Leave milliseconds of the timed steps and this process's peak memory for the benchmark."""
        times_ms = np.diff(self._starts[WARMUP_STEPS:]) * 1e3
        measured: dict[str, Any] = {
            "step_ms": float(times_ms.mean()),
            "step_ms_p50": float(np.median(times_ms)),
            # Of all threads of the rank; gloo's wait without taking any.
            "cpu_ms": float(np.diff(self._cpu_s[WARMUP_STEPS:]).mean() * 1e3),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        Path(os.environ[OUT], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(measured))
