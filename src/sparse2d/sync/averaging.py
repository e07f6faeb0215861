"""Averages the M replicas of this rank's shards: all rows, every K steps."""

import time

import torch
import torch.distributed as dist

from sparse2d.config import SyncConfig, SyncMoments
from sparse2d.parallel.sparse_2d import Sparse2D


class ReplicaAverager:
    """Call ``after_step`` once per training step; the schedule is counted from step 1.

    Args:
        model: the 2D model whose shards are averaged.
        config: K, and whether moments go with the weights.
    """

    def __init__(self, model: Sparse2D, config: SyncConfig) -> None:
        self._model = model
        self._config = config
        self._include_moments = config.moments is SyncMoments.with_weights
        self.durations_s: list[float] = []
        if all(weight.device.type == "cpu" for weight in model.table_weights):
            model.set_all_reduce_hook(self._mean_over_gloo)

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors that one averaging reduces on this rank (not the bytes on the wire)."""
        moments = self._model.table_moments if self._include_moments else []
        return sum(tensor.numel() * tensor.element_size() for tensor in [*self._model.table_weights, *moments])

    def after_step(self, step: int) -> None:
        """Average if ``step`` (1-based) is a multiple of K."""
        if step % self._config.interval == 0:
            start = time.perf_counter()
            self.average()
            self.durations_s.append(time.perf_counter() - start)

    def average(self) -> None:
        """Replace weights, and moments if configured, by their mean over the replicas."""
        self._model.sync(include_optimizer_state=self._include_moments)

    def _mean_over_gloo(self, tensors: list[torch.Tensor]) -> None:
        """Gloo has no average: sum, then divide. One flat buffer: a collective per table costs 26 latencies."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._model.replica_pg)
        flat.div_(dist.get_world_size(self._model.replica_pg))
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, mean in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(mean.view_as(tensor))
