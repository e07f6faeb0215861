"""Adam on the rows of a batch where FBGEMM has no kernel for it: on the CPU, and for replicated tables."""

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from sparse2d.config import OptimizerConfig


@torch.no_grad()
def update_rows(
    weight: Tensor, moments: tuple[Tensor, Tensor], rows: Tensor, grad: Tensor, step: int, config: OptimizerConfig
) -> None:
    """One step on some rows (formula: ``reference.adam``).

    Args:
        weight: [num_embeddings, columns].
        moments: first and second, [num_embeddings, columns] each.
        rows: distinct, [n].
        grad: [n, columns].
        step: 1-based.
        config: lr, betas, eps.
    """
    first = moments[0].index_select(0, rows).lerp_(grad, 1 - config.beta1)
    second = moments[1].index_select(0, rows).lerp_(grad.square(), 1 - config.beta2)
    moments[0].index_copy_(0, rows, first)
    moments[1].index_copy_(0, rows, second)
    root = second.div_(1 - config.beta2**step).sqrt_().add_(config.eps)
    weight.index_add_(0, rows, first.div_(root), alpha=-config.lr / (1 - config.beta1**step))


class FusedRowAdam:
    """Adam fused into the backward pass of a lookup kernel that has no Adam of its own.

    FBGEMM's CPU kernels know SGD and AdaGrad only. The kernel runs SGD with lr = 0; the gradient of its pooled
    embeddings, which is all that the update needs, arrives here first. The state is where FBGEMM's would be:
    ``split_optimizer_states`` and ``iter``.

    Args:
        kernel: sum pooling on the CPU.
        config: lr, betas, eps.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen, config: OptimizerConfig) -> None:
        self._kernel = kernel
        self._config = config
        # `.data`: the kernel's backward pass, still to come, refuses weights that autograd saw change since the lookup.
        self._weights = [weight.data for weight in kernel.split_embedding_weights()]
        self._moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self._weights]
        kernel.split_optimizer_states = lambda: [list(moments) for moments in self._moments]
        kernel.register_forward_hook(self._after_lookup, with_kwargs=True)

    def _after_lookup(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pooled: Tensor) -> None:
        if pooled.requires_grad:
            indices, offsets = kwargs["indices"], kwargs["offsets"]
            assert kwargs.get("per_sample_weights") is None, "only sums of rows are pooled here"
            pooled.register_hook(lambda grad: self._update(indices, offsets, grad))

    @torch.no_grad()
    def _update(self, indices: Tensor, offsets: Tensor, grad: Tensor) -> None:
        """Step on the rows of one lookup.

        Args:
            indices: rows, feature by feature, [n].
            offsets: where each bag begins, [features x batch + 1].
            grad: of the pooled embeddings, [batch, columns of all features].
        """
        self._kernel.iter.add_(1)
        step = int(self._kernel.iter)
        batch = len(grad)
        bags = torch.repeat_interleave(torch.arange(batch).repeat(len(self._kernel.feature_table_map)), offsets.diff())
        bounds = offsets[::batch].tolist() if batch else [0]
        column = 0
        rows_of: dict[int, list[Tensor]] = {}
        grads_of: dict[int, list[Tensor]] = {}
        for feature, table in enumerate(self._kernel.feature_table_map):
            columns = self._weights[table].shape[1]
            part = slice(bounds[feature], bounds[feature + 1])
            rows_of.setdefault(table, []).append(indices[part].long())
            grads_of.setdefault(table, []).append(grad[bags[part], column : column + columns])
            column += columns
        for table, rows in rows_of.items():
            unique, inverse = torch.cat(rows).unique(return_inverse=True)
            total = torch.zeros(len(unique), self._weights[table].shape[1])
            total.index_add_(0, inverse, torch.cat(grads_of[table]))
            update_rows(self._weights[table], self._moments[table], unique, total, step, self._config)


class ReplicatedRowAdam(torch.optim.Optimizer):
    """Adam for tables that every rank holds: a row whose averaged gradient is zero was in no rank's batch and stays.

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
                    state |= {
                        "step": torch.zeros(1, dtype=torch.int64),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
                state["step"] += 1
                rows = param.grad.any(dim=1).nonzero().squeeze(1)
                moments = (state["exp_avg"], state["exp_avg_sq"])
                update_rows(param, moments, rows, param.grad[rows], int(state["step"]), self._config)
