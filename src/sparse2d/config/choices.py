"""What an option with a fixed set of values may be."""

from enum import Enum


class DataSource(Enum):
    """Where the raw rows come from."""

    synthetic = "synthetic"
    raw = "raw"


class DenseMapping(Enum):
    """How a dense value becomes a feature (see ``data/mappings.py``)."""

    fixed_shift = "fixed_shift"
    torchrec = "torchrec"


class IdMapping(Enum):
    """How a token becomes a row: modulo the table's rows, by a vocabulary fitted on the training rows, or as it is.

    ``as_found`` is for arrays of ids: one beyond its table is refused.
    """

    hash = "hash"
    contiguous = "contiguous"
    as_found = "as_found"


class OnBadLine(Enum):
    """Whether a line that breaks the grammar ends the ingest, or is left out and listed."""

    strict = "strict"
    reject = "reject"


class SplitKind(Enum):
    """Which rows train: the first of equal parts, all days but the last, or ranges given by row."""

    parts = "parts"
    last_day = "last_day"
    rows = "rows"


class ParallelismKind(Enum):
    """How embedding tables are laid out over the ranks."""

    data_parallel = "data_parallel"
    full_mp = "full_mp"
    sparse_2d = "sparse_2d"


class Replicas(Enum):
    """Rank layout of 2D: where the M replicas of one shard sit."""

    intra_host = "intra_host"
    inter_host = "inter_host"


class ShardingKind(Enum):
    """Sharding types the planner may choose from (values are TorchRec's names).

    A table's rows or columns are spread over the group (``row_wise``, ``column_wise``), over the group's ranks on one
    host (``table_row_wise``, ``table_column_wise``), or its columns over hosts and their rows inside each
    (``grid_shard``).
    """

    table_wise = "table_wise"
    row_wise = "row_wise"
    column_wise = "column_wise"
    table_row_wise = "table_row_wise"
    table_column_wise = "table_column_wise"
    grid_shard = "grid_shard"


class SyncRows(Enum):
    """Which rows are averaged: those that any replica looked up since the last time, all, or what sends fewer bytes."""

    touched = "touched"
    all = "all"
    auto = "auto"


class SyncMoments(Enum):
    """Whether optimizer moments are averaged with the weights, one averaging later than them, or never."""

    with_weights = "with_weights"
    delayed = "delayed"
    never = "never"


class Combine(Enum):
    """How the replicas of a row are merged: ``mean`` is the paper's; the others are defined in ``sync/combine.py``.

    ``auto`` is one of the others where that applies, else ``mean`` (see ``checks.settle``).
    """

    auto = "auto"
    mean = "mean"
    delta_sum = "delta_sum"
    touch_mean = "touch_mean"
    merged_gradient = "merged_gradient"
    gradient = "gradient"


class WireDtype(Enum):
    """What touched rows are sent as: their values in fp32, or what changed in them in bf16 (summed in fp32)."""

    fp32 = "fp32"
    bf16 = "bf16"


class TableOptimizer(Enum):
    """Optimizer of the embedding tables (fused into the lookup's backward)."""

    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"
    rowwise_adagrad = "rowwise_adagrad"
    momentum_scaled_rowwise_adagrad = "momentum_scaled_rowwise_adagrad"

    def state_values(self, columns: int) -> int:
        """Moments of a row of so many columns: fp32 values."""
        elementwise = {TableOptimizer.sgd: 0, TableOptimizer.adagrad: columns, TableOptimizer.adam: 2 * columns}
        return elementwise.get(self, 1)


class DenseOptimizer(Enum):
    """Optimizer of the data-parallel dense part."""

    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"


class OutputBias(Enum):
    """Initial bias of the last layer: zero, or the logit of the training base rate."""

    base_rate = "base_rate"
    zero = "zero"


class Device(Enum):
    """``auto`` takes CUDA where there is a GPU for every local rank, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class EngineKind(Enum):
    """``distributed`` trains on real ranks, ``emulated`` makes the same updates for all of them in one process."""

    distributed = "distributed"
    emulated = "emulated"


class Pipeline(Enum):
    """Whether TorchRec's pipeline overlaps a step with the next batches' way to the device and to their shards."""

    auto = "auto"
    none = "none"
    sparse_dist = "sparse_dist"


class Timing(Enum):
    """What is timed: whole steps, or the phases of each, too (see ``phases.py``)."""

    steps = "steps"
    phases = "phases"


class WandbMode(Enum):
    """wandb's own modes."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


class ReproduceScale(Enum):
    """How much of a study is run: what 2 cores can do in minutes, or all of it."""

    laptop = "laptop"
    full = "full"
