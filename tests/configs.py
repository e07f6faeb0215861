"""Small configurations for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir

from sparse2d.config import (
    CheckpointConfig,
    DataConfig,
    DataSource,
    DenseOptimizer,
    DenseOptimizerConfig,
    Device,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    ShardingKind,
    SyncConfig,
    SyncMoments,
    SyntheticConfig,
    TableOptimizer,
    TrackingConfig,
    TrainConfig,
    WandbMode,
    conf_dir,
    register_schemas,
)


def experiments_of(program: str) -> list[str]:
    """Names of the experiments whose header says that they are of ``sparse2d.<program>``."""
    files = (conf_dir() / "experiment").glob("*.yaml")
    return sorted(path.stem for path in files if f"sparse2d.{program}" in path.read_text())


@contextmanager
def composing(config_dir: Path) -> Iterator[None]:
    """Hydra over the files of a folder."""
    register_schemas()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        yield


def tiny_data(out_dir: Path, rows: int = 1400) -> DataConfig:
    """Synthetic rows over 26 tables of 40 to 65 rows."""
    return DataConfig(
        name="tiny",
        source=DataSource.synthetic,
        out_dir=str(out_dir),
        table_rows=[40 + i for i in range(26)],
        synthetic=SyntheticConfig(rows=rows, vocabulary_scale=1.0),
    )


def tiny_overrides(results_dir: Path, out_dir: Path, rows: int = 1400) -> list[str]:
    """The command line of a run on two ranks that trains on ``tiny_data`` in a second."""
    data = tiny_data(out_dir, rows)
    return [
        f"results_dir={results_dir}",
        f"data.name={data.name}",
        f"data.out_dir={out_dir}",
        f"data.table_rows={data.table_rows}".replace(" ", ""),
        f"data.min_table_rows={data.min_table_rows}",
        f"data.synthetic.rows={rows}",
        f"data.synthetic.vocabulary_scale={data.synthetic.vocabulary_scale}",
        "global_batch_size=60",
        "eval_batch_size=32",
        "log_every=5",
        "model.embedding_dim=8",
        "model.dense_arch=[16,8]",
        "model.over_arch=[16,1]",
        "launch.num_ranks=2",
    ]


def tiny_train(
    results_dir: Path,
    kind: ParallelismKind = ParallelismKind.full_mp,
    *,
    num_ranks: int = 2,
    num_groups: int = 1,
    sharding: list[ShardingKind] | None = None,
    optimizer: TableOptimizer = TableOptimizer.sgd,
    moment_scale: float | str = 1.0,
    dense: DenseOptimizer = DenseOptimizer.sgd,
    interval: int = 1,
    moments: SyncMoments = SyncMoments.with_weights,
    save_every: int | None = None,
) -> TrainConfig:
    """A model of 8-dimensional tables that trains in milliseconds."""
    return TrainConfig(
        experiment="test",
        global_batch_size=60,
        eval_batch_size=32,
        log_every=5,
        results_dir=str(results_dir),
        data=tiny_data(results_dir / "data"),
        model=ModelConfig(embedding_dim=8, dense_arch=[16, 8], over_arch=[16, 1]),
        parallelism=ParallelismConfig(
            kind=kind, num_groups=num_groups, sharding=sharding or ParallelismConfig().sharding
        ),
        sync=SyncConfig(interval=interval, moments=moments),
        optimizer=OptimizerConfig(
            name=optimizer,
            lr=20.0 if optimizer is TableOptimizer.sgd else 0.1,
            moment_scale=moment_scale,
            dense=DenseOptimizerConfig(name=dense, lr=0.1),
        ),
        launch=LaunchConfig(num_ranks=num_ranks, device=Device.cpu),
        checkpoint=CheckpointConfig(interval=save_every),
        tracking=TrackingConfig(mode=WandbMode.disabled),
    )
