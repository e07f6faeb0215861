"""A workload from the config of a training run: its tables, multi-hot sizes, and the FLOPs of its DLRM."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse2d.cli import explain, refuse_unknown
from sparse2d.config import NUM_DENSE, TableOptimizer, TrainConfig, check_train
from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.prepare import known_table_rows
from sparse2d.errors import UserError

VALUE_BYTES = 4


@dataclass(frozen=True)
class ModelWorkload:
    """Tables and dense part of a DLRM, and its optimizer's state; all values are fp32, ids int32."""

    names: list[str]
    rows: list[int]
    dims: list[int]
    pooling: list[float]
    flops_per_sample: float
    dense_params: float
    state_bytes_per_row: int
    state_bytes_per_value: int


def model_workload(overrides: Sequence[str]) -> ModelWorkload:
    """The model of ``python -m sparse2d.train <overrides>``.

    Called inside an entry point, where Hydra is set up already.

    Raises:
        UserError: if ``train`` would refuse them, or the tables' sizes depend on data that are not prepared.
    """
    config = _train_config(overrides)
    rows = known_table_rows(config.data)
    if rows is None:
        raise UserError(
            "workload.train: with data.ids=contiguous the tables' rows are known only of prepared data; prepare them "
            "and give the folder as data.path"
        )
    return workload_of(config, rows)


def _train_config(overrides: Sequence[str]) -> TrainConfig:
    try:
        composed = hydra.compose("train", list(overrides))
        refuse_unknown(composed, TrainConfig)
        config = OmegaConf.to_object(composed)
        assert isinstance(config, TrainConfig)
        check_train(config)
        return config
    except (UserError, HydraException, OmegaConfBaseException) as error:
        fault = explain(error, TrainConfig)
    # Out here, for whoever explains this error would explain its cause, as an option of another program.
    raise UserError(f"workload.train: {fault}")


def workload_of(config: TrainConfig, rows: Sequence[int]) -> ModelWorkload:
    """The model of a training config whose 26 tables have ``rows`` rows."""
    dim, num_tables = config.model.embedding_dim, len(rows)
    # The bottom MLP's output is one more vector among the tables' in the interaction.
    interactions = (num_tables + 1) * num_tables // 2
    layers = [
        *pairwise([NUM_DENSE, *config.model.dense_arch]),
        *pairwise([dim + interactions, *config.model.over_arch]),
    ]
    weights = sum(inputs * outputs for inputs, outputs in layers)
    forward = 2 * weights + 2 * dim * (num_tables + 1) ** 2
    moments = {TableOptimizer.sgd: 0, TableOptimizer.adagrad: 1, TableOptimizer.adam: 2}.get(config.optimizer.name)
    return ModelWorkload(
        names=[f"t_{name}" for name in FEATURE_NAMES],
        rows=list(rows),
        dims=[dim] * num_tables,
        pooling=[float(count) for count in config.data.multi_hot or [1] * num_tables],
        # Backward computes gradients of inputs and of weights: twice the forward's work.
        flops_per_sample=3.0 * forward,
        dense_params=float(weights + sum(outputs for _, outputs in layers)),
        # The others keep one moment of a row.
        state_bytes_per_row=VALUE_BYTES if moments is None else 0,
        state_bytes_per_value=VALUE_BYTES * (moments or 0),
    )
