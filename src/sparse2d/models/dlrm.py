"""DLRM (arXiv 1906.00091) from ``torchrec.models.dlrm``, one table for each categorical feature."""

import math
from collections.abc import Sequence

import torch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from sparse2d.config import NUM_DENSE, ModelConfig, OutputBias
from sparse2d.data.criteo import FEATURE_NAMES


def table_name(feature: str) -> str:
    """The table of a feature: ``t_C1`` for ``C1``."""
    return f"t_{feature}"


def build_dlrm(
    config: ModelConfig, num_embeddings: Sequence[int], base_rate: float, seed: int, device: torch.device
) -> DLRMTrain:
    """DLRM with its loss, dense part initialised on ``device``, tables on the meta device (see ``parallel/tables.py``).

    Args:
        config: layer sizes.
        num_embeddings: rows of the 26 tables.
        base_rate: share of positives among the training rows, for the output bias.
        seed: of the dense part's initial weights; every rank draws the same.
        device: of the dense part.
    """
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(
            name=table_name(feature), embedding_dim=config.embedding_dim, num_embeddings=rows, feature_names=[feature]
        )
        for feature, rows in zip(FEATURE_NAMES, num_embeddings, strict=True)
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=list(config.dense_arch),
        over_arch_layer_sizes=list(config.over_arch),
        dense_device=device,
    )
    # A zero bias makes the first gradients of all rows large and alike until it has found the base rate.
    bias = math.log(base_rate / (1 - base_rate)) if config.output_bias is OutputBias.base_rate else 0.0
    *_, last = (module for module in dlrm.over_arch.modules() if isinstance(module, torch.nn.Linear))
    torch.nn.init.constant_(last.bias, bias)
    return DLRMTrain(dlrm)
