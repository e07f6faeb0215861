"""A workload from the config of a training run: its tables, multi-hot sizes, and the FLOPs of its DLRM."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import hydra
from omegaconf import OmegaConf

from sparse2d.config import NUM_DENSE, TrainConfig
from sparse2d.data.criteo import FEATURE_NAMES


@dataclass(frozen=True)
class ModelWorkload:
    """Tables and dense part of a DLRM."""

    names: list[str]
    rows: list[int]
    dims: list[int]
    pooling: list[float]
    flops_per_sample: float
    dense_params: float


def model_workload(overrides: Sequence[str]) -> ModelWorkload:
    """The model of ``python -m sparse2d.train <overrides>``.

    Called inside an entry point, where Hydra is set up already.
    """
    config = OmegaConf.to_object(hydra.compose("train", list(overrides)))
    assert isinstance(config, TrainConfig)
    rows = config.data.num_embeddings
    dim, num_tables = config.model.embedding_dim, len(rows)
    # The bottom MLP's output is one more vector among the tables' in the interaction.
    interactions = (num_tables + 1) * num_tables // 2
    layers = [
        *pairwise([NUM_DENSE, *config.model.dense_arch]),
        *pairwise([dim + interactions, *config.model.over_arch]),
    ]
    weights = sum(inputs * outputs for inputs, outputs in layers)
    forward = 2 * weights + 2 * dim * (num_tables + 1) ** 2
    return ModelWorkload(
        names=[f"t_{name}" for name in FEATURE_NAMES],
        rows=list(rows),
        dims=[dim] * num_tables,
        pooling=[float(count) for count in config.data.multi_hot or [1] * num_tables],
        # Backward computes gradients of inputs and of weights: twice the forward's work.
        flops_per_sample=3.0 * forward,
        dense_params=float(weights + sum(outputs for _, outputs in layers)),
    )
