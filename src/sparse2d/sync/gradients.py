"""Averages the gradients of touched rows over the replicas before every step, so that 2D steps as full MP does."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse2d.config import OptimizerConfig
from sparse2d.optimizers.rows import RowGradients, new_moments, update_rows
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.parallel.tables import lookup_kernels
from sparse2d.sync.collectives import Exchange, flatten
from sparse2d.sync.rows import ShardRows
from sparse2d.sync.touched import distinct

# Gradients of the distinct rows of one table: rows [n] and their gradients [n, columns].
TableGradient = tuple[Tensor, Tensor]


class GradientAverager:
    """``sync.combine=gradient``: the tables' optimizer, stepping on the mean gradient of all groups.

    A row's gradient is the mean over the M groups, zero where a group has not looked it up; rows that no group looked
    up stay. Replicas take the same step and so stay bit-equal. The kernels only look up (SGD with lr = 0).

    Args:
        model: the 2D model.
        config: the tables' optimizer.
    """

    def __init__(self, model: Sparse2D, config: OptimizerConfig) -> None:
        self._config = config
        kernels = lookup_kernels(model)
        self._moments: list[list[Tensor]] = []
        self._gradients: list[list[TableGradient]] = [[] for _ in kernels]
        for number, kernel in enumerate(kernels):
            module = kernel.emb_module
            moments = [new_moments(weight, config) for weight in module.split_embedding_weights()]
            # Where FBGEMM's state would be, so that checkpoints find it.
            module.split_optimizer_states = lambda moments=moments: moments
            self._moments += moments
            RowGradients(module, self._receiver(number))
        self._rows = ShardRows(model)
        self._exchange = Exchange(model.replica_pg, self._rows.num_rows)
        self.durations_s: list[float] = []

    def _receiver(self, number: int) -> Callable[[list[TableGradient]], None]:
        def receive(gradients: list[TableGradient]) -> None:
            self._gradients[number] = gradients

        return receive

    @property
    def payloads_bytes(self) -> list[int]:
        """Bytes that this rank handed to collectives, for each step."""
        return self._exchange.payloads_bytes

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Average the gradients of the backward pass just done and update the tables; a collective."""
        if not self._rows.shards:
            return
        start = time.perf_counter()
        self._exchange.begin()
        empty = torch.empty(0, dtype=torch.int64, device=self._rows.device)
        own = [gradient for gradients in self._gradients for gradient in gradients] or [
            (empty, shard.weight.new_zeros(0, shard.weight.shape[1])) for shard in self._rows.shards
        ]
        self._gradients = [[] for _ in self._gradients]
        keys = torch.cat([rows + self._rows.starts[i] for i, (rows, _) in enumerate(own)])
        union = self._rows.split(distinct(self._exchange.all_keys(keys), self._rows.num_rows))
        sums = []
        for rows, (own_rows, own_grad) in zip(union, own, strict=True):
            grad = own_grad.new_zeros(len(rows), own_grad.shape[1])
            grad[torch.searchsorted(rows, own_rows)] = own_grad
            sums.append(grad)
        flat = self._exchange.mean(flatten(sums, self._rows.device))
        means = flat.split([grad.numel() for grad in sums])
        for kernel in self._rows.kernels:
            kernel.emb_module.iter.add_(1)
        taken = int(self._rows.kernels[0].emb_module.iter)
        for shard, moments, rows, grad, mean in zip(self._rows.shards, self._moments, union, sums, means, strict=True):
            weight, row_grad = shard.weight.data, mean.view_as(grad)
            update_rows(weight, moments, rows, row_grad, step=taken, moment_scale=1.0, config=self._config)
        self.durations_s.append(time.perf_counter() - start)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is left between steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
