"""The same optimizers as kernels: FBGEMM's, fused into the lookup's backward, and torch's for the dense part."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from sparse2d.config import DenseOptimizer, DenseOptimizerConfig, OptimizerConfig, TableOptimizer
from sparse2d.optimizers.rows import FusedRowAdam, ReplicatedRowAdam
from sparse2d.parallel.plans import TableSharder

_FUSED = {
    TableOptimizer.sgd: EmbOptimType.EXACT_SGD,
    TableOptimizer.adagrad: EmbOptimType.EXACT_ADAGRAD,
    TableOptimizer.adam: EmbOptimType.ADAM,
    TableOptimizer.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    TableOptimizer.momentum_scaled_rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_DENSE: dict[DenseOptimizer, type[torch.optim.Optimizer]] = {
    DenseOptimizer.sgd: torch.optim.SGD,
    DenseOptimizer.adagrad: torch.optim.Adagrad,
    DenseOptimizer.adam: torch.optim.Adam,
}


def moment_scale(config: OptimizerConfig, num_groups: int) -> float:
    """The number c behind ``optimizer.moment_scale``: M for ``auto``."""
    return float(num_groups) if config.moment_scale == "auto" else float(config.moment_scale)


def _scaled(config: OptimizerConfig, num_groups: int) -> dict[str, float]:
    """``lr * g / (sqrt(v / c) + eps)`` as a kernel of ``lr' * g / (sqrt(v) + eps')`` computes it.

    Multiplying numerator and denominator by sqrt(c) gives lr' = lr sqrt(c) and eps' = eps sqrt(c): no new kernel.
    """
    root = math.sqrt(moment_scale(config, num_groups))
    return {"lr": config.lr * root, "eps": config.eps * root}


# A kernel that leaves its rows alone: whoever updates them gets their gradients from ``RowGradients``.
_LOOKUP_ONLY = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}


def table_sharder(
    config: OptimizerConfig, num_groups: int, device: torch.device, *, fused: bool = True
) -> TableSharder:
    """TorchRec's sharder, carrying the tables' optimizer if that is ``fused`` into their lookups."""
    return TableSharder(
        fused_params=fused_params(config, num_groups, device) if fused else dict(_LOOKUP_ONLY),
        prepare=lambda kernels: fuse_row_adam(config, kernels) if fused else None,
        state_bytes_per_row=lambda columns: 4 * config.name.state_values(columns),
    )


def fused_params(config: OptimizerConfig, num_groups: int, device: torch.device) -> dict[str, Any]:
    """FBGEMM's kernel and its numbers, for TorchRec's sharders."""
    if config.name is TableOptimizer.adam and device.type == "cpu":
        return dict(_LOOKUP_ONLY)
    params: dict[str, Any] = {"optimizer": _FUSED[config.name]}
    if config.name is TableOptimizer.sgd:
        return params | {"learning_rate": config.lr}
    if config.name is TableOptimizer.adagrad:
        return params | {"learning_rate": config.lr, "eps": config.eps}
    if config.name is TableOptimizer.adam:
        betas = {"beta1": config.beta1, "beta2": config.beta2}
        return params | betas | {"learning_rate": config.lr, "eps": config.eps}
    scaled = _scaled(config, num_groups)
    return params | {"learning_rate": scaled["lr"], "eps": scaled["eps"]}


def fuse_row_adam(config: OptimizerConfig, kernels: Iterable[nn.Module]) -> None:
    """Give Adam to lookup kernels on the CPU, where FBGEMM has none; does nothing for another optimizer or device."""
    for kernel in kernels:
        if (
            config.name is TableOptimizer.adam
            and isinstance(kernel, BatchedFusedEmbeddingBag)
            and kernel.emb_module.use_cpu
        ):
            FusedRowAdam(kernel.emb_module, config)


def _dense_optimizer(config: DenseOptimizerConfig, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's optimizer for dense parameters."""
    numbers = {"lr": config.lr} if config.name is DenseOptimizer.sgd else {"lr": config.lr, "eps": config.eps}
    return _DENSE[config.name](params, **numbers)


def _replicated_table_optimizer(config: OptimizerConfig, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Optimizer of data-parallel tables, whose gradients are already averaged over all ranks."""
    if config.name is TableOptimizer.sgd:
        return torch.optim.SGD(params, lr=config.lr)
    if config.name is TableOptimizer.adagrad:
        return torch.optim.Adagrad(params, lr=config.lr, eps=config.eps)
    if config.name is TableOptimizer.adam:
        return ReplicatedRowAdam(params, config)
    return RowWiseAdagrad(params, **_scaled(config, num_groups=1))


def build_optimizer(
    config: OptimizerConfig, fused: KeyedOptimizer, parameters: dict[str, nn.Parameter]
) -> CombinedOptimizer:
    """One optimizer over everything.

    Args:
        config: the options.
        fused: the sharded tables' optimizer, which steps inside the backward pass.
        parameters: the parameters that are not fused, by name; tables among them are replicated.
    """
    tables = {name: param for name, param in parameters.items() if ".embedding_bags." in name}
    dense = {name: param for name, param in parameters.items() if name not in tables}
    parts: list[tuple[str, KeyedOptimizer]] = [
        ("tables", fused),
        ("dense", KeyedOptimizerWrapper(dense, lambda params: _dense_optimizer(config.dense, params))),
    ]
    if tables:
        parts.append(
            (
                "replicated_tables",
                KeyedOptimizerWrapper(tables, lambda params: _replicated_table_optimizer(config, params)),
            )
        )
    return CombinedOptimizer(parts)
