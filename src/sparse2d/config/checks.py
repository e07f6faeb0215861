"""Checks that cross options: contradictions are refused before any file is written or process started."""

from dataclasses import fields
from enum import Enum

from sparse2d.config.choices import (
    Combine,
    EngineKind,
    ParallelismKind,
    Pipeline,
    ShardingKind,
    SyncMoments,
    SyncRows,
    TableOptimizer,
    Timing,
    WireDtype,
)
from sparse2d.config.compression import AveragingMethod, LookupMethod, check_compression
from sparse2d.config.options import (
    ModelConfig,
    SyncConfig,
    TrainConfig,
)
from sparse2d.errors import UserError


def check_train(config: TrainConfig) -> None:
    """Refuse options that contradict each other, before any file is written or process started.

    Raises:
        UserError: one line with the numbers and the remedy.
    """
    _check_numbers(config)
    _check_parallelism(config)
    _check_model(config.model)
    _check_optimizer(config)
    check_compression(config.compression)
    _check_what_is_compressed(config)
    if config.engine is EngineKind.emulated:
        _check_emulated(config)


_ADAGRAD = (TableOptimizer.adagrad, TableOptimizer.rowwise_adagrad)


def settle(config: TrainConfig) -> None:
    """Put in the place of ``sync.combine=auto`` the rule that it stands for.

    With AdaGrad, ``merged_gradient`` makes full model parallelism's updates at K = 1; above it, and with Adam,
    ``touch_mean`` keeps more NE than the paper's ``mean`` (experiments/ne_rules, sync_interval, optimizers). Both are
    for moments that go with the weights and that nothing else scales. SGD has none, and the mean is exact.
    """
    sync = config.sync
    if sync.combine is not Combine.auto:
        return
    applies = (
        config.parallelism.num_groups > 1
        and config.optimizer.name in (*_ADAGRAD, TableOptimizer.adam)
        and config.optimizer.moment_scale == 1
        and config.optimizer.lr > 0
        and sync.moments is SyncMoments.with_weights
        and sync.rows is not SyncRows.all
        and config.compression.averaging.method is AveragingMethod.none
    )
    is_exact = config.optimizer.name in _ADAGRAD and sync.interval == 1
    of_moments = Combine.merged_gradient if is_exact else Combine.touch_mean
    sync.combine = of_moments if applies else Combine.mean


def _check_emulated(config: TrainConfig) -> None:
    """Refuse options that decide how real ranks send what they send: in one process nothing is sent."""
    if config.parallelism.kind is ParallelismKind.data_parallel:
        raise UserError("engine=emulated needs parallelism=full_mp or sparse_2d; data_parallel makes full_mp's updates")
    sent = {"sync.rows": (config.sync.rows, SyncRows.auto), "sync.wire_dtype": (config.sync.wire_dtype, WireDtype.fp32)}
    steps = {"pipeline": (config.pipeline, Pipeline.auto), "timing": (config.timing, Timing.steps)}
    for name, (value, default) in {**sent, **steps}.items():
        if value is not default:
            raise UserError(f"{name}={value.name} has no effect with engine=emulated; leave it at {default.name}")
    if config.compression.is_on:
        raise UserError("engine=emulated sends nothing that could be compressed; use compression=none")
    if config.checkpoint.resume_path is not None:
        raise UserError("engine=emulated reads no checkpoints: leave checkpoint.resume out")


def _check_numbers(config: TrainConfig) -> None:
    at_least_one = {
        "global_batch_size": config.global_batch_size,
        "rank_batch_size": config.rank_batch_size,
        "eval_batch_size": config.eval_batch_size,
        "log_every": config.log_every,
        "eval_every": config.eval_every,
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
    if (bins := config.frequency_bins) is not None and (bins[:1] != [0] or bins != sorted(set(bins))):
        raise UserError(f"frequency_bins={bins} must begin with 0 and rise")
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
    if config.sync.combine not in (Combine.mean, Combine.auto):
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
    if sync.combine is Combine.merged_gradient and (config.optimizer.name not in _ADAGRAD or config.optimizer.lr == 0):
        raise UserError(
            f"sync.combine={rule} needs optimizer=rowwise_adagrad or adagrad with optimizer.lr above 0, not "
            f"{config.optimizer.name.name} with {config.optimizer.lr}: it takes gradients back from AdaGrad's steps"
        )
    if config.optimizer.moment_scale != 1:
        raise UserError(
            f"sync.combine={rule} needs optimizer.moment_scale=1 (optimizer=rowwise_adagrad), not "
            f"{config.optimizer.moment_scale}: its moments grow as full model parallelism's do"
        )


def _check_what_is_compressed(config: TrainConfig) -> None:
    """Refuse to compress what the layout does not send."""
    lookup, averaging = config.compression.lookup.method, config.compression.averaging.method
    if lookup is not LookupMethod.none and config.parallelism.kind is ParallelismKind.data_parallel:
        raise UserError(
            f"compression.lookup.method={lookup.name} needs parallelism=full_mp or sparse_2d; data_parallel sends no "
            "pooled embeddings"
        )
    if lookup is LookupMethod.qcomm_int8:
        _check_int8(config)
    if averaging is AveragingMethod.none:
        return
    if config.parallelism.kind is not ParallelismKind.sparse_2d:
        raise UserError(
            f"compression.averaging.method={averaging.name} needs parallelism=sparse_2d; "
            f"{config.parallelism.kind.name} averages nothing"
        )
    if config.optimizer.name is TableOptimizer.adam and config.sync.moments is SyncMoments.with_weights:
        raise UserError(
            f"compression.averaging.method={averaging.name} needs sync.moments=never with optimizer=adam: of a second "
            "moment that falls, what is held back could make it negative"
        )
    wanted: dict[str, tuple[Enum, ...]] = {
        "rows": (SyncRows.touched, SyncRows.auto),
        "combine": (Combine.mean,),
        "moments": (SyncMoments.with_weights, SyncMoments.never),
        "wire_dtype": (WireDtype.fp32,),
    }
    for name, values in wanted.items():
        value = getattr(config.sync, name)
        if value not in (*values, Combine.auto):
            raise UserError(
                f"compression.averaging.method={averaging.name} needs sync.{name}="
                f"{' or '.join(kind.name for kind in values)}, not {value.name}"
            )


def _check_int8(config: TrainConfig) -> None:
    """FBGEMM's codec scales 32 values together, and shards have columns in multiples of four."""
    rows = {
        f"global_batch_size={config.global_batch_size} over {config.launch.num_ranks} ranks": (
            config.global_batch_size // config.launch.num_ranks
        ),
        "eval_batch_size": config.eval_batch_size,
    }
    for name, number in rows.items():
        if number % 8 != 0:
            raise UserError(
                f"compression.lookup.method=qcomm_int8 needs a multiple of 8 rows per rank; {name} gives {number}"
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
