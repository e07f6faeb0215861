"""Typed options of training, preprocessing and reports.

Each option is declared once, here; the files under ``conf/`` only hold values. Keys that are not declared are refused.
"""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from sparse2d.config.choices import (
    Combine,
    DataSource,
    DenseMapping,
    DenseOptimizer,
    Device,
    EngineKind,
    IdMapping,
    OnBadLine,
    OutputBias,
    ParallelismKind,
    Pipeline,
    Replicas,
    ReproduceScale,
    ShardingKind,
    SplitKind,
    SyncMoments,
    SyncRows,
    TableOptimizer,
    Timing,
    WandbMode,
    WireDtype,
)
from sparse2d.config.compression import CompressionConfig


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
    # Rows of the 26 tables before floor and cap; with ids=hash, tokens are taken modulo the result.
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
    # null = one for each configuration: its seeds.
    group: str | None = None


@dataclass
class TrainConfig:
    """``python -m sparse2d.train``."""

    experiment: str = "adhoc"
    seed: int = 0
    # B, the same whatever T and M are, so that NE is comparable.
    global_batch_size: int = 512
    # Rows per rank and step, which make B = T times as many: weak scaling. null = B is as given.
    rank_batch_size: int | None = None
    # Rows per rank and evaluation step.
    eval_batch_size: int = 1024
    # Score evaluation rows also by how often training saw their rarest id, in bins that begin at these counts.
    frequency_bins: list[int] | None = None
    # Stop after so many steps; null = one pass over the training rows.
    max_steps: int | None = None
    # Steps between logged points.
    log_every: int = 20
    # Steps between evaluations while training, for curves; null = only the one at the end. It changes no result.
    eval_every: int | None = None
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
    # With -m: end the sweep at the first job that fails, instead of running the others.
    fail_fast: bool = False
    # Only print what each rank would hold, and write a plan file that parallelism.plan_file pins.
    plan_only: bool = False
    # With plan_only: the file; null = results_dir/plans/<experiment>-<digest>.json.
    plan_out: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
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


@dataclass
class ReproduceConfig:
    """``python -m sparse2d.reproduce``; what it runs writes to the checkout's ``results/``."""

    # laptop = each claim on 2 cores, under half an hour together; full = as for the committed tables.
    scale: ReproduceScale = ReproduceScale.laptop
    # Claims of experiments/claims.yaml to run; empty = all.
    claims: list[str] = field(default_factory=list)
    # Raw rows in Criteo Kaggle's format; null = synthetic rows.
    data_path: str | None = None
    # Run claims again that were finished before. Finished training runs are not repeated even so.
    rerun: bool = False
