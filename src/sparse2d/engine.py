"""Model, optimizers and averaging, laid out over the ranks and ready to step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from sparse2d.compression.build import build_compressors
from sparse2d.compression.compressor import Compressor
from sparse2d.config import AveragingCompressionConfig, Combine, EngineKind, OptimizerConfig, SyncConfig, TrainConfig
from sparse2d.data.dataset import Dataset
from sparse2d.emulation.engine import EmulatedAverager, emulate
from sparse2d.mesh import Mesh, RankInfo
from sparse2d.models.dlrm import build_dlrm
from sparse2d.optimizers.fused import build_optimizer, table_sharder
from sparse2d.parallel import shard_model
from sparse2d.parallel.plan_summary import PlanSummary, plan_and_summarise
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.parallel.startup import check_start
from sparse2d.parallel.tables import initialise_tables, lookup_kernels
from sparse2d.parallel.torchrec_plans import table_configs
from sparse2d.plan import Plan
from sparse2d.sync.averaging import ReplicaAverager
from sparse2d.sync.gradients import GradientAverager


@dataclass(frozen=True)
class Engine:
    """One rank's share of a training setup.

    Attributes:
        model: the sharded model with its loss.
        optimizer: of the dense part; tables step inside the backward pass.
        averager: of the replicas, under 2D.
        compressors: of traffic, by the name of their option.
        plan: what each rank of a group holds, in numbers.
        placement: where the tables are.
        table_shapes: (rows, dim) of every table, by name.
        device: of this rank.
    """

    model: nn.Module
    optimizer: CombinedOptimizer
    averager: ReplicaAverager | GradientAverager | EmulatedAverager | None
    compressors: dict[str, Compressor]
    plan: PlanSummary
    placement: Plan
    table_shapes: dict[str, tuple[int, int]]
    device: torch.device

    def train_step(self, batch: Batch, step: int) -> Tensor:
        """Forward, backward (with the tables' update), dense update, averaging; returns this rank's mean loss.

        Args:
            batch: this rank's rows.
            step: 1-based, for the averaging schedule.
        """
        self.begin_step(step)
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.average(step)
        return loss.detach()

    def begin_step(self, step: int) -> None:
        """Tell what compresses which step (1-based) begins."""
        for compressor in self.compressors.values():
            compressor.begin_step(step)

    def average(self, step: int) -> None:
        """Average the replicas if ``step`` (1-based) is due; does nothing outside of 2D."""
        if self.averager is not None:
            self.averager.after_step(step)

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward whose effects the caller overwrites, as loading a checkpoint does.

        DistributedDataParallel deals its buckets anew for its third backward (measured, torch 2.13). That decides in
        which order gradients of three or more ranks are summed, so a resumed run has to have as many backwards behind
        it as an undisturbed one, or two.
        """
        self.begin_step(1)
        loss, _ = self.model(batch)
        loss.backward()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside the block; weights and optimizer state are the same bits after it.

        FBGEMM's kernels count a step of Adam in every forward pass, an evaluation's too (``iter`` of fbgemm-gpu 1.8).
        """
        counters = [counter for kernel in lookup_kernels(self.model) for counter in _step_counters(kernel.emb_module)]
        before = [counter.clone() for counter in counters]
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            for counter, value in zip(counters, before, strict=True):
                counter.copy_(value)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Logits [b] of this rank's rows; changes neither weights nor optimizer state."""
        _, (_, logits, _) = self.model(batch)
        return logits


def _step_counters(kernel: nn.Module) -> list[Tensor]:
    names = ("iter", "iter_cpu")
    return [getattr(kernel, name) for name in names if isinstance(getattr(kernel, name, None), Tensor)]


def build_averager(
    model: Sparse2D,
    sync: SyncConfig,
    optimizer: OptimizerConfig,
    compression: AveragingCompressionConfig | None = None,
) -> ReplicaAverager | GradientAverager:
    """What ``sync.combine`` asks for."""
    if sync.combine is Combine.gradient:
        return GradientAverager(model, optimizer)
    return ReplicaAverager(model, sync, optimizer, compression)


def build_engine(config: TrainConfig, dataset: Dataset, rank: RankInfo, device: torch.device) -> Engine:
    """Build everything that ``config`` describes; a collective over all T ranks."""
    if config.engine is EngineKind.emulated:
        return Engine(**emulate(config, dataset, device), device=device)
    mesh = Mesh(rank.world_size, config.parallelism.num_groups, config.parallelism.replicas)
    module = build_dlrm(config.model, dataset.num_embeddings, dataset.base_rate, config.seed, device)
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in table_configs(module)}
    fused = config.sync.combine is not Combine.gradient
    sharder = table_sharder(config.optimizer, mesh.num_groups, device, fused=fused)
    world = dist.group.WORLD
    assert world is not None
    # One rank plans for all: hosts may differ in memory, and planning on every core at once takes longer than training.
    plan, summary = invoke_on_rank_and_broadcast_result(
        world,
        0,
        plan_and_summarise,
        module,
        sharder,
        config.parallelism,
        mesh=mesh,
        local_world_size=rank.local_world_size,
        rank_batch_size=config.global_batch_size // rank.world_size,
        device=device,
    )
    model = shard_model(module, config.parallelism, mesh, plan, sharder, device)
    initialise_tables(model, shapes, config.seed)
    check_start(model, plan, mesh, shapes)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return Engine(
        model=model,
        optimizer=build_optimizer(config.optimizer, model.fused_optimizer, dense),
        averager=build_averager(model, config.sync, config.optimizer, config.compression.averaging)
        if isinstance(model, Sparse2D)
        else None,
        compressors=build_compressors(model, config.compression),
        plan=summary,
        placement=plan,
        table_shapes=shapes,
        device=device,
    )
