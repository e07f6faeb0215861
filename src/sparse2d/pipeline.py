"""Training steps over a stream of batches: one after the other, or through TorchRec's pipeline."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from sparse2d.config import Pipeline
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import RankBatch
from sparse2d.engine import Engine


class TrainSteps:
    """Draws batches and trains on them.

    ``sparse_dist`` copies batch i+2 to the device and sends the ids of batch i+1 to their shards while batch i is
    computed; lookups wait for the step before, its averaging included, so that the weights are the same bit for bit.

    Args:
        engine: what is trained.
        batches: this rank's rows, step by step.
        kind: ``auto`` takes the pipeline on CUDA.
    """

    def __init__(self, engine: Engine, batches: Iterator[RankBatch], kind: Pipeline) -> None:
        self._engine = engine
        self._labels: deque[NDArray[np.float32]] = deque()
        on_cuda = engine.device.type == "cuda"
        self._pipeline: TrainPipelineSparseDist | None = None
        if kind is Pipeline.sparse_dist or (kind is Pipeline.auto and on_cuda):
            # Averaging is ours: upstream's pipeline would call DMPCollection.sync itself, every step.
            self._pipeline = TrainPipelineSparseDist(
                engine.model, engine.optimizer, engine.device, dmp_collection_sync_interval_batches=None
            )
        self._batches = self._drawn(batches)

    def _drawn(self, batches: Iterator[RankBatch]) -> Iterator[Batch]:
        for batch in batches:
            self._labels.append(batch.labels)
            if self._pipeline is None:
                yield to_torchrec(batch, self._engine.device)
            else:
                host = to_torchrec(batch, torch.device("cpu"))
                yield host.pin_memory() if self._engine.device.type == "cuda" else host

    def draw(self) -> Batch:
        """The next batch, on the device.

        Raises:
            StopIteration: if there is none left.
        """
        return next(self._batches)

    def train(self, step: int) -> tuple[Tensor, NDArray[np.float32]]:
        """Train on the next batch; returns this rank's mean loss, on the device, and the batch's labels.

        Args:
            step: 1-based, for the averaging schedule.

        Raises:
            StopIteration: if there is no batch left.
        """
        if self._pipeline is None:
            loss = self._engine.train_step(self.draw(), step)
        else:
            self._engine.begin_step(step)
            loss, *_ = self._pipeline.progress(self._batches)
            self._engine.average(step)
        return loss, self._labels.popleft()

    def pause(self) -> None:
        """Give the model back, for an evaluation, say: batches that are drawn already wait for the next ``train``."""
        if self._pipeline is not None:
            self._pipeline.detach()
