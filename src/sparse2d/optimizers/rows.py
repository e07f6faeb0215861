"""Table optimizers on some rows at a time, in plain torch: where FBGEMM has no kernel or comes too late."""

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from sparse2d.config import OptimizerConfig, TableOptimizer


def new_moments(weight: Tensor, config: OptimizerConfig) -> list[Tensor]:
    """Zero moments of one table [rows, columns], shaped as FBGEMM's: row-wise [rows], element-wise [rows, columns]."""
    if config.name is TableOptimizer.sgd:
        return []
    if config.name is TableOptimizer.adam:
        return [torch.zeros_like(weight), torch.zeros_like(weight)]
    if config.name is TableOptimizer.adagrad:
        return [torch.zeros_like(weight)]
    return [weight.new_zeros(len(weight))]


@torch.no_grad()
def update_rows(
    weight: Tensor,
    moments: list[Tensor],
    rows: Tensor,
    grad: Tensor,
    *,
    step: int,
    moment_scale: float,
    config: OptimizerConfig,
) -> None:
    """One step on some rows, in place (formulas: ``reference.py``).

    Args:
        weight: [num_embeddings, columns].
        moments: as ``new_moments`` makes them.
        rows: distinct, [n].
        grad: [n, columns].
        step: 1-based; Adam's bias correction counts it.
        moment_scale: c of row-wise AdaGrad.
        config: which optimizer, lr, eps, betas.
    """
    if config.name is TableOptimizer.sgd:
        weight.index_add_(0, rows, grad, alpha=-config.lr)
        return
    if config.name is TableOptimizer.adam:
        first = moments[0].index_select(0, rows).lerp_(grad, 1 - config.beta1)
        second = moments[1].index_select(0, rows).lerp_(grad.square(), 1 - config.beta2)
        moments[0].index_copy_(0, rows, first)
        moments[1].index_copy_(0, rows, second)
        root = second.div_(1 - config.beta2**step).sqrt_().add_(config.eps)
        weight.index_add_(0, rows, first.div_(root), alpha=-config.lr / (1 - config.beta1**step))
        return
    square = grad.square()
    if config.name is not TableOptimizer.adagrad:
        square = square.mean(dim=1)
    moment = moments[0].index_select(0, rows).add_(square)
    moments[0].index_copy_(0, rows, moment)
    root = moment.div_(moment_scale).sqrt_().add_(config.eps)
    root = root if root.dim() == 2 else root.unsqueeze(1)
    weight.index_add_(0, rows, grad / root, alpha=-config.lr)


class RowGradients:
    """Hands out the coalesced gradients of the rows that a lookup kernel pooled, in the backward pass.

    The kernel itself must leave its rows alone (SGD with lr = 0): the gradient of its pooled embeddings, from which
    those of the rows follow, arrives here before the kernel's own backward pass.

    Args:
        kernel: sum pooling, unweighted.
        receive: called once in each backward pass with, for each table of the kernel in turn, the distinct rows [n]
            that were looked up and their gradients [n, columns].
    """

    def __init__(
        self,
        kernel: SplitTableBatchedEmbeddingBagsCodegen,
        receive: Callable[[list[tuple[Tensor, Tensor]]], None],
    ) -> None:
        self._kernel = kernel
        self._receive = receive
        self._columns = [weight.shape[1] for weight in kernel.split_embedding_weights()]
        kernel.register_forward_hook(self._after_lookup, with_kwargs=True)

    def _after_lookup(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pooled: Tensor) -> None:
        if pooled.requires_grad:
            indices, offsets = kwargs["indices"], kwargs["offsets"]
            assert kwargs.get("per_sample_weights") is None, "only sums of rows are pooled here"
            pooled.register_hook(lambda grad: self._coalesce(indices, offsets, grad))

    @torch.no_grad()
    def _coalesce(self, indices: Tensor, offsets: Tensor, grad: Tensor) -> None:
        """Sum the gradients of each row.

        Args:
            indices: rows, feature by feature, [n].
            offsets: where each bag begins, [features x batch + 1].
            grad: of the pooled embeddings, [batch, columns of all features].
        """
        batch, features = len(grad), self._kernel.feature_table_map
        bags = torch.arange(batch, device=grad.device).repeat(len(features)).repeat_interleave(offsets.diff())
        bounds = offsets[::batch].tolist() if batch else [0] * (len(features) + 1)
        rows: list[list[Tensor]] = [[] for _ in self._columns]
        grads: list[list[Tensor]] = [[] for _ in self._columns]
        column = 0
        for feature, table in enumerate(features):
            part = slice(bounds[feature], bounds[feature + 1])
            rows[table].append(indices[part].long())
            grads[table].append(grad[bags[part], column : column + self._columns[table]])
            column += self._columns[table]
        self._receive([_coalesced(torch.cat(r), torch.cat(g)) for r, g in zip(rows, grads, strict=True)])


def _coalesced(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    unique, inverse = rows.unique(return_inverse=True)
    return unique, grads.new_zeros(len(unique), grads.shape[1]).index_add_(0, inverse, grads)


class FusedRowAdam:
    """Adam fused into the backward pass of a lookup kernel that has no Adam of its own: FBGEMM's CPU kernels.

    Its state is where FBGEMM's would be: ``split_optimizer_states`` and ``iter``.

    Args:
        kernel: sum pooling, its own optimizer SGD with lr = 0.
        config: lr, betas, eps.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen, config: OptimizerConfig) -> None:
        self._kernel = kernel
        self._config = config
        # `.data`: the kernel's backward pass, still to come, refuses weights that autograd saw change since the lookup.
        self._weights = [weight.data for weight in kernel.split_embedding_weights()]
        self._moments = [new_moments(weight, config) for weight in self._weights]
        kernel.split_optimizer_states = lambda: self._moments
        RowGradients(kernel, self._update)

    def _update(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        self._kernel.iter.add_(1)
        step = int(self._kernel.iter)
        for weight, moments, (rows, grad) in zip(self._weights, self._moments, gradients, strict=True):
            update_rows(weight, moments, rows, grad, step=step, moment_scale=1.0, config=self._config)


class ReplicatedRowAdam(torch.optim.Optimizer):
    """Adam for tables that every rank holds: a row whose averaged gradient is zero was in no rank's batch and stays.

    So does one whose gradients cancel to exactly zero, of which the fused kernels would decay the moments.

    Args:
        params: tables [num_embeddings, dim].
        config: lr, betas, eps.
    """

    def __init__(self, params: list[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(params, {"lr": config.lr})
        self._config = config

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all tables from their gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    first, second = new_moments(param, self._config)
                    state |= {
                        "step": torch.zeros(1, dtype=torch.int64),
                        "exp_avg": first,
                        "exp_avg_sq": second,
                    }
                state["step"] += 1
                rows = param.grad.any(dim=1).nonzero().squeeze(1)
                update_rows(
                    param,
                    [state["exp_avg"], state["exp_avg_sq"]],
                    rows,
                    param.grad[rows],
                    step=int(state["step"]),
                    moment_scale=1.0,
                    config=self._config,
                )
