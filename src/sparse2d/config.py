"""Typed options of every entry point, and the checks that cross fields.

Each option is declared once, here; the files under ``conf/`` only hold values. Keys that are not declared are refused.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from sparse2d.errors import UserError

NUM_DENSE = 13
NUM_SPARSE = 26


class DataSource(Enum):
    """Where the raw rows come from."""

    synthetic = "synthetic"
    raw = "raw"


class DenseMapping(Enum):
    """How a dense value becomes a feature (see ``data/mappings.py``)."""

    fixed_shift = "fixed_shift"
    torchrec = "torchrec"


class IdMapping(Enum):
    """How a token becomes a table row: modulo the table's rows, or by a vocabulary fitted on the training rows."""

    hash = "hash"
    contiguous = "contiguous"


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
    """How the replicas of a row are merged: ``mean`` is the paper's; the others are defined in ``sync/combine.py``."""

    mean = "mean"
    delta_sum = "delta_sum"
    touch_mean = "touch_mean"
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


@dataclass
class SyntheticConfig:
    """The planted teacher behind ``data=synthetic`` (see ``data/synthetic.py``)."""

    rows: int = 160_000
    # The rows are dealt over so many days, as equally as can be.
    days: int = 1
    seed: int = 0
    base_rate: float = 0.25
    zipf_exponent: float = 1.05
    vocabulary_scale: float = 0.002
    min_vocabulary: int = 3
    latent_dim: int = 4
    logit_std: float = 1.5
    missing_rate: float = 0.1


@dataclass
class DataConfig:
    """Raw rows, how they become arrays, and which of them are used."""

    name: str = MISSING
    source: DataSource = MISSING
    # A raw Criteo file (plain, .gz or .zst), a folder of them (day_0, day_1.gz, ...), or a folder of arrays: one that
    # `sparse2d.preprocess` wrote, or MLPerf's or TorchRec's day_D_*.npy.
    path: str | None = None
    # The same, where only a folder of raw days will do.
    raw_dir: str | None = None
    # Days of the folder to take, in numeric order; null = all.
    days: list[int] | None = None
    # Where prepared arrays are kept, one folder for each input and set of options.
    out_dir: str = "${results_dir}/data"
    # Of train_parts + eval_parts equal parts of the rows, in time order, the first train_parts train, the rest scores.
    train_parts: int = 6
    eval_parts: int = 1
    split: SplitKind = SplitKind.parts
    # Score on the first half of those rows only, and keep the second half as `test`.
    halve_eval: bool = False
    # With split=rows: [start, stop) of train, eval and, if wanted, test.
    split_rows: dict[str, list[int]] | None = None
    # Use only the first so many rows of either part; null = all.
    train_rows: int | None = None
    eval_rows: int | None = None
    # Rows of the 26 tables before floor and cap; ids are taken modulo the result.
    table_rows: list[int] = MISSING
    min_table_rows: int = 1
    max_table_rows: int = 40_000_000
    ids: IdMapping = IdMapping.hash
    # With ids=contiguous: a token is kept if it is seen at least so often in the training rows.
    min_count: int = 3
    # With ids=contiguous: use this vocabulary (a file or a prepared folder) instead of fitting one.
    vocabulary: str | None = None
    dense: DenseMapping = DenseMapping.fixed_shift
    # With dense=torchrec: the smallest dense value of the raw files; smaller ones are taken as it.
    dense_min: int = -2
    on_bad_line: OnBadLine = OnBadLine.strict
    # With on_bad_line=reject: more bad lines than this end the ingest after all.
    max_rejects: int = 1000
    # Threads that parse; null = one for each core. It changes no output.
    workers: int | None = None
    # Train on the rows in an order drawn from `shuffle_seed`: null = time order.
    shuffle_seed: int | None = None
    # Ids for each feature and row: the row's own first, the others drawn from a fixed seed; null = one each.
    multi_hot: list[int] | None = None
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    @property
    def num_embeddings(self) -> list[int]:
        """Rows of each of the 26 tables after floor and cap."""
        return [min(max(rows, self.min_table_rows), self.max_table_rows) for rows in self.table_rows]


@dataclass
class ModelConfig:
    """DLRM (arXiv 1906.00091) from TorchRec's modules."""

    name: str = "dlrm"
    embedding_dim: int = 16
    dense_arch: list[int] = field(default_factory=lambda: [64, 16])
    over_arch: list[int] = field(default_factory=lambda: [64, 32, 1])
    output_bias: OutputBias = OutputBias.base_rate


@dataclass
class ParallelismConfig:
    """T ranks = M groups of N (arXiv 2508.03854, section 3)."""

    kind: ParallelismKind = MISSING
    # M, replicas of each shard. Full model parallelism has one.
    num_groups: int = 1
    replicas: Replicas = Replicas.intra_host
    # What the planner may choose from; one entry forces it (tables too small for it are then placed table-wise).
    sharding: list[ShardingKind] = field(
        default_factory=lambda: [ShardingKind.table_wise, ShardingKind.row_wise, ShardingKind.column_wise]
    )
    # Ranks that the plan takes to share a host, for sharding inside hosts; null = as they are launched.
    ranks_per_host: int | None = None
    # Place the tables as this file says (see plan_only) instead of planning.
    plan_file: str | None = None


@dataclass
class SyncConfig:
    """When and what the replicas of a shard average."""

    # K, steps between averagings (1 = every step; above, local SGD, arXiv 1805.09767).
    interval: int = 1
    rows: SyncRows = SyncRows.auto
    combine: Combine = Combine.mean
    moments: SyncMoments = SyncMoments.with_weights
    wire_dtype: WireDtype = WireDtype.fp32


@dataclass
class DenseOptimizerConfig:
    """The dense part: plain data parallel over all T ranks."""

    name: DenseOptimizer = DenseOptimizer.adam
    lr: float = 1e-3
    eps: float = 1e-8


@dataclass
class OptimizerConfig:
    """The tables' optimizer; ``moment_scale`` is c in ``w -= lr * g / (sqrt(v / c) + eps)``."""

    name: TableOptimizer = MISSING
    lr: float = 0.02
    eps: float = 1e-8
    # Of adam: decay of the first and second moment.
    beta1: float = 0.9
    beta2: float = 0.999
    # "auto" = M, the number of groups; or a number.
    moment_scale: str | int | float = 1.0
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)

    def __post_init__(self) -> None:
        """4 and 4.0 are one value, with one fingerprint."""
        if isinstance(self.moment_scale, int):
            self.moment_scale = float(self.moment_scale)


@dataclass
class LaunchConfig:
    """Ranks this machine starts itself; under torchrun or srun the world is theirs and num_ranks must agree."""

    num_ranks: int = 8
    threads_per_rank: int = 1
    device: Device = Device.auto
    # How often ranks are started again after a failure, from the last checkpoint (torchrun has --max-restarts).
    max_restarts: int = 0


@dataclass
class CheckpointConfig:
    """Checkpoints in ``<run>/checkpoints/``, and what a stopped run goes on from; none of it changes a result."""

    # Steps between checkpoints; there is one at the end, too. null = none.
    interval: int | None = None
    # How many are kept while the run goes on; a finished run keeps the last one.
    keep: int = 2
    # Write them beside training, from a copy in host memory.
    asynchronous: bool = True
    # "auto" goes on from the run's newest sound one, "never" starts anew. A path (a step-* folder, or the newest one in
    # a folder) is loaded, whatever layout wrote it, unless the run has checkpoints of its own already.
    resume: str = "auto"
    # Seconds that ranks get after SIGTERM to finish their step and write one.
    grace_s: int = 25

    @property
    def resume_path(self) -> Path | None:
        """The path, if ``resume`` is one."""
        return None if self.resume in ("auto", "never") else Path(self.resume)


@dataclass
class TrackingConfig:
    """wandb; everything it gets is also in metrics.jsonl and record.json."""

    mode: WandbMode = WandbMode.offline
    project: str = "sparse2d"
    entity: str | None = None
    group: str | None = None


@dataclass
class TrainConfig:
    """``python -m sparse2d.train``."""

    experiment: str = "adhoc"
    seed: int = 0
    # B, the same whatever T and M are, so that NE is comparable.
    global_batch_size: int = 512
    # Rows per rank and evaluation step.
    eval_batch_size: int = 1024
    # Stop after so many steps; null = one pass over the training rows.
    max_steps: int | None = None
    # Steps between logged points.
    log_every: int = 20
    # emulated = launch.num_ranks ranks in one process, for NE: M may be large, and speed says nothing about ranks.
    engine: EngineKind = EngineKind.distributed
    # auto = sparse_dist (TrainPipelineSparseDist) on CUDA, none on the CPU. It changes no result.
    pipeline: Pipeline = Pipeline.auto
    timing: Timing = Timing.steps
    # Write torch.profiler's trace of a few steps of every rank into the run's folder, for Perfetto.
    profile: bool = False
    results_dir: str = "results"
    # Run again even if a finished run of the same fingerprint exists.
    rerun: bool = False
    # Only print what each rank would hold, and write a plan file that parallelism.plan_file pins.
    plan_only: bool = False
    # With plan_only: the file; null = results_dir/plans/<experiment>-<digest>.json.
    plan_out: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def ranks_per_process(self) -> int:
        """Ranks that a process stands for: all T if they are emulated."""
        return self.launch.num_ranks if self.engine is EngineKind.emulated else 1


@dataclass
class PreprocessConfig:
    """``python -m sparse2d.preprocess``."""

    results_dir: str = "results"
    # Verify what was prepared before instead of preparing: sizes, digests, ranges, finite values.
    check: bool = False
    data: DataConfig = field(default_factory=DataConfig)


@dataclass
class ReportConfig:
    """``python -m sparse2d.report``."""

    results_dir: str = "results"
    # Tables to build; empty = every table that has runs.
    tables: list[str] = field(default_factory=list)


def check_train(config: TrainConfig) -> None:
    """Refuse options that contradict each other, before any file is written or process started.

    Raises:
        UserError: one line with the numbers and the remedy.
    """
    _check_numbers(config)
    _check_parallelism(config)
    _check_model(config.model)
    _check_optimizer(config)
    if config.engine is EngineKind.emulated:
        _check_emulated(config)


def _check_emulated(config: TrainConfig) -> None:
    """Refuse options that decide how real ranks send what they send: in one process nothing is sent."""
    if config.parallelism.kind is ParallelismKind.data_parallel:
        raise UserError("engine=emulated needs parallelism=full_mp or sparse_2d; data_parallel makes full_mp's updates")
    sent = {"sync.rows": (config.sync.rows, SyncRows.auto), "sync.wire_dtype": (config.sync.wire_dtype, WireDtype.fp32)}
    steps = {"pipeline": (config.pipeline, Pipeline.auto), "timing": (config.timing, Timing.steps)}
    for name, (value, default) in {**sent, **steps}.items():
        if value is not default:
            raise UserError(f"{name}={value.name} has no effect with engine=emulated; leave it at {default.name}")
    if config.checkpoint.interval is not None or config.checkpoint.resume_path is not None:
        raise UserError(
            "engine=emulated neither writes nor reads checkpoints: leave checkpoint.interval and checkpoint.resume out"
        )


def _check_numbers(config: TrainConfig) -> None:
    at_least_one = {
        "global_batch_size": config.global_batch_size,
        "eval_batch_size": config.eval_batch_size,
        "log_every": config.log_every,
        "max_steps": config.max_steps,
        "sync.interval": config.sync.interval,
        "launch.num_ranks": config.launch.num_ranks,
        "launch.threads_per_rank": config.launch.threads_per_rank,
        "parallelism.num_groups": config.parallelism.num_groups,
        "parallelism.ranks_per_host": config.parallelism.ranks_per_host,
        "checkpoint.interval": config.checkpoint.interval,
        "checkpoint.keep": config.checkpoint.keep,
        "data.train_rows": config.data.train_rows,
        "data.eval_rows": config.data.eval_rows,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    for name, value in {
        "launch.max_restarts": config.launch.max_restarts,
        "checkpoint.grace_s": config.checkpoint.grace_s,
    }.items():
        if value < 0:
            raise UserError(f"{name}={value} must be at least 0")
    if config.launch.max_restarts and config.checkpoint.interval is None:
        raise UserError(
            f"launch.max_restarts={config.launch.max_restarts} needs checkpoint.interval: without checkpoints each "
            "restart would begin anew"
        )
    if config.timing is Timing.phases and config.pipeline is Pipeline.sparse_dist:
        raise UserError("timing=phases needs pipeline=none: sparse_dist overlaps the phases of two steps")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed={config.seed} must be in [0, 2**32)")


def _check_parallelism(config: TrainConfig) -> None:
    ranks, batch, layout = config.launch.num_ranks, config.global_batch_size, config.parallelism
    if batch % ranks != 0:
        below, above = batch - batch % ranks, batch - batch % ranks + ranks
        raise UserError(
            f"global_batch_size={batch} is not divisible by launch.num_ranks={ranks}; "
            f"use {f'{below} or {above}' if below else above}"
        )
    if layout.kind is ParallelismKind.sparse_2d:
        if ranks % layout.num_groups != 0:
            divisors = [m for m in range(1, ranks + 1) if ranks % m == 0]
            raise UserError(
                f"launch.num_ranks={ranks} is not divisible by parallelism.num_groups={layout.num_groups}; "
                f"choose M from {divisors}"
            )
    elif layout.num_groups != 1:
        raise UserError(
            f"parallelism.num_groups={layout.num_groups} needs parallelism=sparse_2d; {layout.kind.name} has one group"
        )
    if layout.kind is not ParallelismKind.sparse_2d:
        defaults = SyncConfig()
        for option in fields(SyncConfig):
            value = getattr(config.sync, option.name)
            if value != getattr(defaults, option.name):
                text = value.name if isinstance(value, Enum) else value
                raise UserError(
                    f"sync.{option.name}={text} needs parallelism=sparse_2d; {layout.kind.name} averages nothing"
                )
    if config.sync.wire_dtype is WireDtype.bf16 and config.sync.rows is SyncRows.all:
        raise UserError(
            "sync.wire_dtype=bf16 needs sync.rows=touched or auto: it sends what changed in touched rows; "
            "all rows as bf16 would round every weight to 8 bits"
        )
    if layout.ranks_per_host is not None and ranks % layout.ranks_per_host != 0:
        divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise UserError(
            f"launch.num_ranks={ranks} is not divisible by parallelism.ranks_per_host={layout.ranks_per_host}; "
            f"choose from {divisors}"
        )
    if config.plan_out is not None and not config.plan_only:
        raise UserError(f"plan_out={config.plan_out} has no effect without plan_only=true")
    if config.sync.combine is not Combine.mean:
        _check_combine(config)
    if not layout.sharding:
        raise UserError(f"parallelism.sharding is empty; name at least one of {[kind.name for kind in ShardingKind]}")


def _check_combine(config: TrainConfig) -> None:
    sync, rule = config.sync, config.sync.combine.name
    if sync.rows is SyncRows.all:
        raise UserError(
            f"sync.combine={rule} needs sync.rows=touched or auto: old values are kept of touched rows only"
        )
    if sync.moments is not SyncMoments.with_weights:
        raise UserError(f"sync.combine={rule} needs sync.moments=with_weights, not {sync.moments.name}")
    if sync.combine is Combine.gradient and (sync.interval != 1 or sync.wire_dtype is not WireDtype.fp32):
        raise UserError(
            f"sync.combine=gradient needs sync.interval=1 and sync.wire_dtype=fp32, not {sync.interval} and "
            f"{sync.wire_dtype.name}: gradients are averaged before every step"
        )
    if config.optimizer.moment_scale != 1:
        raise UserError(
            f"sync.combine={rule} needs optimizer.moment_scale=1 (optimizer=rowwise_adagrad), not "
            f"{config.optimizer.moment_scale}: its moments grow as full model parallelism's do"
        )


def _check_model(model: ModelConfig) -> None:
    if model.embedding_dim < 4 or model.embedding_dim % 4 != 0:
        raise UserError(f"model.embedding_dim={model.embedding_dim} must be a positive multiple of 4 (FBGEMM)")
    if not model.dense_arch or model.dense_arch[-1] != model.embedding_dim:
        raise UserError(
            f"model.dense_arch={model.dense_arch} must end with model.embedding_dim={model.embedding_dim}, "
            "since DLRM takes dot products of both"
        )
    if not model.over_arch or model.over_arch[-1] != 1:
        raise UserError(f"model.over_arch={model.over_arch} must end with 1, the logit")
    if min(model.dense_arch + model.over_arch) < 1:
        raise UserError(f"layer sizes must be at least 1: dense_arch={model.dense_arch}, over_arch={model.over_arch}")


def _check_optimizer(config: TrainConfig) -> None:
    optimizer = config.optimizer
    for name, lr in {"optimizer.lr": optimizer.lr, "optimizer.dense.lr": optimizer.dense.lr}.items():
        if not 0 <= lr < float("inf"):
            raise UserError(f"{name}={lr} must be a finite number >= 0")
    for name, eps in {"optimizer.eps": optimizer.eps, "optimizer.dense.eps": optimizer.dense.eps}.items():
        if not 0 < eps < float("inf"):
            raise UserError(f"{name}={eps} must be a finite number > 0")
    for name, beta in {"optimizer.beta1": optimizer.beta1, "optimizer.beta2": optimizer.beta2}.items():
        if not 0 <= beta < 1:
            raise UserError(f"{name}={beta} must be in [0, 1)")
    scale = optimizer.moment_scale
    if scale == "auto":
        if optimizer.name is not TableOptimizer.momentum_scaled_rowwise_adagrad:
            raise UserError(
                "optimizer.moment_scale=auto needs optimizer=momentum_scaled_rowwise_adagrad, "
                f"not {optimizer.name.name}"
            )
        return
    if isinstance(scale, str) or not 0 < scale < float("inf"):
        raise UserError(f"optimizer.moment_scale={scale} must be auto or a finite number > 0")
    if scale != 1 and optimizer.name is not TableOptimizer.momentum_scaled_rowwise_adagrad:
        raise UserError(
            f"optimizer.moment_scale={scale} needs optimizer=momentum_scaled_rowwise_adagrad, not {optimizer.name.name}"
        )


def register_schemas() -> None:
    """Make the typed declarations known to Hydra under the names that ``conf/*.yaml`` refer to."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="preprocess_schema", node=PreprocessConfig)
    store.store(name="report_schema", node=ReportConfig)
    # Not at the top: its options refer to the enums above.
    from sparse2d.cost.config import SimulateConfig

    store.store(name="simulate_schema", node=SimulateConfig)


def conf_dir() -> Path:
    """The ``conf/`` folder: at the top of the checkout, or inside an installed wheel.

    Raises:
        UserError: if there is none beside the package.
    """
    package = Path(__file__).parent
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(f"no conf/ folder beside {package}; install sparse2d from its checkout: pip install -e .")
