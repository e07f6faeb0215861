"""What tests run on real ranks; importable by name, since the fork server's children unpickle it."""

import hashlib
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sparse2d.config import (
    AveragingCompressionConfig,
    Combine,
    OptimizerConfig,
    ParallelismConfig,
    Pipeline,
    SyncConfig,
    TableOptimizer,
    TrainConfig,
)
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.engine import build_averager, build_engine
from sparse2d.errors import UserError
from sparse2d.loop import evaluate
from sparse2d.mesh import Mesh, process_group
from sparse2d.metrics import Metrics
from sparse2d.optimizers.fused import table_sharder
from sparse2d.parallel import shard_model
from sparse2d.parallel.plan_summary import plan_and_summarise
from sparse2d.parallel.plans import make_plan
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.parallel.startup import check_start
from sparse2d.parallel.tables import gather_moments, gather_tables, initialise_tables, local_shards, lookup_kernels
from sparse2d.pipeline import TrainSteps

CPU = torch.device("cpu")

# In ranks only: TorchRec tells every rank's every step; what tests print on failure should be the failure.
if multiprocessing.parent_process() is not None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


@dataclass(frozen=True)
class Trained:
    """Everything a short training leaves behind; moments for each state of the optimizer."""

    tables: dict[str, Tensor]
    moments: list[dict[str, Tensor]]
    dense: dict[str, Tensor]
    losses: list[float]
    metrics: Metrics


def train_all(configs: list[TrainConfig], dataset: Path, steps: int) -> list[Trained]:
    """Train each config on the same ranks, one after the other."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        return [_train(config, dataset, steps, rank) for config in configs]


def _train(config, dataset, steps, rank) -> Trained:
    rows = open_dataset(dataset)
    engine = build_engine(config, rows, rank, CPU)
    batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=steps)
    losses = [engine.train_step(to_torchrec(batch, CPU), step).item() for step, batch in enumerate(batches, start=1)]
    dense = {
        name.replace("module.", ""): value.detach().clone()
        for name, value in engine.model.named_parameters()
        if "embedding_bags" not in name
    }
    return Trained(
        tables=gather_tables(engine.model, engine.table_shapes),
        moments=gather_moments(engine.model, engine.table_shapes),
        dense=dense,
        losses=losses,
        metrics=evaluate(engine, config, rows, rank)[0],
    )


@dataclass(frozen=True)
class DenseStep:
    """The dense part in one step: parameters before and after it, and the gradients."""

    before: dict[str, Tensor]
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]


def dense_steps(config: TrainConfig, dataset: Path, steps: int) -> list[DenseStep]:
    """The first steps of the dense part."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        engine = build_engine(config, rows, rank, CPU)
        dense = {name: p for name, p in engine.model.named_parameters() if "embedding_bags" not in name}
        done = []
        for step, batch in enumerate(train_batches(rows, config.global_batch_size, 0, 1, max_steps=steps), start=1):
            before = {name: param.detach().clone() for name, param in dense.items()}
            engine.train_step(to_torchrec(batch, CPU), step)
            gradients = {name: param.grad.clone() for name, param in dense.items()}
            done.append(DenseStep(before, gradients, {name: p.detach().clone() for name, p in dense.items()}))
        return done


def weights_around_evaluation(config: TrainConfig, dataset: Path) -> bool:
    """Whether an evaluation between training steps leaves weights, moments and the next steps bit-equal.

    Every forward pass counts a step, as FBGEMM's Adam kernels on CUDA do.
    """
    torch.set_num_threads(1)
    results = []
    with process_group(CPU) as rank:
        rows = open_dataset(dataset)
        for evaluates in (False, True):
            engine = build_engine(config, rows, rank, CPU)
            for kernel in lookup_kernels(engine.model):
                kernel.emb_module.register_forward_hook(lambda kernel, *_: kernel.iter.add_(1) and None)
            batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=6)
            for step, batch in enumerate(batches, start=1):
                engine.train_step(to_torchrec(batch, CPU), step)
                if evaluates and step == 3:
                    evaluate(engine, config, rows, rank)
            results.append(
                (gather_tables(engine.model, engine.table_shapes), gather_moments(engine.model, engine.table_shapes))
            )
    (tables, moments), (tables_evaluated, moments_evaluated) = results
    pairs = zip([tables, *moments], [tables_evaluated, *moments_evaluated], strict=True)
    return all(torch.equal(one[table], other[table]) for one, other in pairs for table in one)


@dataclass(frozen=True)
class Followed:
    """A training with evaluations between: losses, labels in the order of training, metrics, digest of all tables."""

    losses: list[float]
    labels: list[list[float]]
    metrics: list[Metrics]
    tables: str


def train_through(config: TrainConfig, dataset: Path, kinds: list[Pipeline], evaluate_every: int) -> list[Followed]:
    """Train to the end of the rows through each kind of pipeline, with an evaluation after every few steps."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        return [_train_through(config, dataset, kind, evaluate_every, rank) for kind in kinds]


def _train_through(config, dataset, kind, evaluate_every, rank) -> Followed:
    rows = open_dataset(dataset)
    engine = build_engine(config, rows, rank, CPU)
    steps = TrainSteps(engine, train_batches(rows, config.global_batch_size, rank.rank, rank.world_size), kind)
    losses, labels, metrics = [], [], []
    for step in itertools.count(1):
        try:
            loss, of_step = steps.train(step)
        except StopIteration:
            break
        losses.append(loss.item())
        labels.append(of_step.tolist())
        if step % evaluate_every == 0:
            steps.pause()
            metrics.append(evaluate(engine, config, rows, rank)[0])
    tables = gather_tables(engine.model, engine.table_shapes)
    content = b"".join(tables[name].numpy().tobytes() for name in sorted(tables))
    return Followed(losses, labels, metrics, hashlib.sha256(content).hexdigest())


class PooledSum(nn.Module):
    """Tables alone: the loss is the pooled embeddings times given weights, so that the gradients are known."""

    def __init__(self, shapes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.feature_names = [f"f_{name}" for name in shapes]
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
                for name, (rows, dim) in shapes.items()
            ],
            device=torch.device("meta"),
        )

    def forward(self, ids: KeyedJaggedTensor, factors: Tensor) -> Tensor:
        pooled = self.tables(ids)
        # By key: sharding changes the order of the columns.
        return (torch.cat([pooled[key] for key in self.feature_names], dim=1) * factors).sum()


@dataclass(frozen=True)
class TableRun:
    """A run of tables alone: layout, optimizer, and the ids [steps, T, tables, ids] and factors [steps, T, b, dims].

    ``restart_at``: go on after this step with a new averager that is given the old one's state.
    """

    shapes: dict[str, tuple[int, int]]
    parallelism: ParallelismConfig
    optimizer: OptimizerConfig
    sync: SyncConfig
    ids: np.ndarray
    factors: np.ndarray
    restart_at: int | None = None
    compression: AveragingCompressionConfig | None = None


@dataclass(frozen=True)
class Stepped:
    """What steps on tables alone leave behind.

    Attributes:
        before: initial tables.
        tables: final tables.
        moments: final moments, for each state of the optimizer.
        unequal_weights: rows (table, row) that are not bit-equal on all replicas in the end.
        unequal_moments: the same of their moments.
        payload_bytes: what rank 0 handed to collectives at each averaging.
        settled: final tables, with the mean over the replicas of what compression holds back.
    """

    before: dict[str, Tensor]
    tables: dict[str, Tensor]
    moments: list[dict[str, Tensor]]
    unequal_weights: set[tuple[str, int]]
    unequal_moments: set[tuple[str, int]]
    payload_bytes: list[int]
    settled: dict[str, Tensor]

    @property
    def replicas_equal(self) -> bool:
        """Whether all replicas are bit-equal."""
        return not self.unequal_weights and not self.unequal_moments


def step_tables(runs: list[TableRun]) -> list[Stepped]:
    """Train tables alone, one run after the other on the same ranks."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        return [_step_tables(run, rank) for run in runs]


def _step_tables(run: TableRun, rank) -> Stepped:
    mesh = Mesh(rank.world_size, run.parallelism.num_groups, run.parallelism.replicas)
    module = PooledSum(run.shapes)
    fused = run.sync.combine is not Combine.gradient
    sharder = table_sharder(run.optimizer, mesh.num_groups, CPU, fused=fused)
    batch = run.factors.shape[2]
    plan = make_plan(
        module,
        sharder,
        run.parallelism,
        group_size=mesh.group_size,
        local_group_size=mesh.local_group_size(run.parallelism.ranks_per_host or rank.local_world_size),
        rank_batch_size=batch,
        device=CPU,
    )
    model = shard_model(module, run.parallelism, mesh, plan, sharder, CPU)
    initialise_tables(model, run.shapes, seed=0)
    before = gather_tables(model, run.shapes)
    options = run.sync, run.optimizer, run.compression
    averager = build_averager(model, *options) if isinstance(model, Sparse2D) else None
    for step in range(len(run.ids)):
        ids = torch.from_numpy(run.ids[step, rank.rank].reshape(-1))
        per_bag = len(ids) // (len(run.shapes) * batch)
        lengths = torch.full((len(run.shapes) * batch,), per_bag, dtype=torch.int32)
        keys = [f"f_{name}" for name in run.shapes]
        features = KeyedJaggedTensor(keys, ids, lengths=lengths)
        model(features, torch.from_numpy(run.factors[step, rank.rank])).backward()
        with torch.no_grad():  # an evaluation, which must leave no trace: it looks up every row
            model(every_row(run.shapes), torch.zeros(1))
        if averager is not None:
            averager.after_step(step + 1)
            if step + 1 == run.restart_at:
                state = averager.state_dict()
                averager = build_averager(model, *options)
                averager.load_state_dict(pickle.loads(pickle.dumps(state)))
    unequal_weights, unequal_moments = _unequal_rows(model, rank)
    tables, moments = gather_tables(model, run.shapes), gather_moments(model, run.shapes)
    if run.compression is not None:
        _settle(model, averager)
    return Stepped(
        before,
        tables,
        moments,
        unequal_weights,
        unequal_moments,
        averager.payloads_bytes if averager is not None else [],
        gather_tables(model, run.shapes),
    )


@torch.no_grad()
def _settle(model: Sparse2D, averager) -> None:
    """Add to every row the mean over the replicas of what is held back of it."""
    compressed = averager._compressed
    for tensor, residual in zip(compressed._tensors, compressed._residuals, strict=True):
        mean = residual.clone()
        torch.distributed.all_reduce(mean, group=model.replica_pg)
        tensor += mean / torch.distributed.get_world_size(model.replica_pg)


def every_row(shapes: dict[str, tuple[int, int]]) -> KeyedJaggedTensor:
    """One bag for each table, with all of its rows."""
    rows = [rows for rows, _ in shapes.values()]
    ids = torch.cat([torch.arange(n) for n in rows])
    return KeyedJaggedTensor([f"f_{name}" for name in shapes], ids, lengths=torch.tensor(rows, dtype=torch.int32))


def _unequal_rows(model: nn.Module, rank) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Rows of which the weights, and the moments, are not bit-equal on all ranks that hold the same shard."""
    shards = [
        (shard.table, shard.row, shard.column, shard.weight.clone(), shard.moments) for shard in local_shards(model)
    ]
    everyone: list = [None] * rank.world_size
    torch.distributed.all_gather_object(everyone, shards)
    first: dict = {}
    unequal: tuple[set, set] = (set(), set())
    for table, row, column, weight, moments in (shard for one in everyone for shard in one):
        first_weight, first_moments = first.setdefault((table, row, column), (weight, moments))
        for rows, pairs in zip(
            unequal, ([(weight, first_weight)], zip(moments, first_moments, strict=True)), strict=True
        ):
            for one, other in pairs:
                differs = (one != other).view(len(one), -1).any(dim=1)
                rows |= {(table, row + index) for index in differs.nonzero().flatten().tolist()}
    return unequal


def pool_with_idle_ranks(
    shapes: dict[str, tuple[int, int]], layouts: list[ParallelismConfig], idle: list[list[int]]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]]:
    """For each layout and set of ranks without any id: tables before and after a step of SGD, and what each rank pools.

    Rank r looks row r up in every table, in each of two bags.
    """
    torch.set_num_threads(1)
    results = []
    with process_group(CPU) as rank:
        for layout in layouts:
            mesh = Mesh(rank.world_size, layout.num_groups, layout.replicas)
            optimizer = OptimizerConfig(TableOptimizer.sgd, lr=1.0)
            module, sharder = PooledSum(shapes), table_sharder(optimizer, mesh.num_groups, CPU)
            local = mesh.local_group_size(layout.ranks_per_host or rank.world_size)
            plan = make_plan(
                module,
                sharder,
                layout,
                group_size=mesh.group_size,
                local_group_size=local,
                rank_batch_size=2,
                device=CPU,
            )
            model = shard_model(module, layout, mesh, plan, sharder, CPU)
            initialise_tables(model, shapes, seed=0)
            averager = build_averager(model, SyncConfig(), optimizer) if isinstance(model, Sparse2D) else None
            for step, ranks in enumerate(idle, start=1):
                before = gather_tables(model, shapes)
                ids = torch.full((0 if rank.rank in ranks else 2 * len(shapes),), rank.rank)
                lengths = torch.full((2 * len(shapes),), 0 if rank.rank in ranks else 1, dtype=torch.int32)
                features = KeyedJaggedTensor([f"f_{name}" for name in shapes], ids, lengths=lengths)
                pooled = model.module.tables(features)
                values = torch.cat([pooled[f"f_{name}"] for name in shapes], dim=1)
                values.sum().backward()
                if averager is not None:
                    averager.after_step(step)
                everyone: list = [None] * rank.world_size
                torch.distributed.all_gather_object(everyone, values.detach())
                results.append((before, gather_tables(model, shapes), everyone))
    return results


def held_bytes(runs: list[TableRun]) -> list[tuple[list[int], list[int]]]:
    """For each run, bytes of weights and moments on each rank of the first group: planned, and in the kernels."""
    with process_group(CPU) as rank:
        return [_held_bytes(run, rank) for run in runs]


def _held_bytes(run: TableRun, rank):
    mesh = Mesh(rank.world_size, run.parallelism.num_groups, run.parallelism.replicas)
    module = PooledSum(run.shapes)
    sharder = table_sharder(run.optimizer, mesh.num_groups, CPU)
    plan, summary = plan_and_summarise(
        module, sharder, run.parallelism, mesh=mesh, local_world_size=mesh.world_size, rank_batch_size=4, device=CPU
    )
    model = shard_model(module, run.parallelism, mesh, plan, sharder, CPU)
    held = sum(
        tensor.nbytes
        for shard in local_shards(model)
        for tensor in (shard.weight, *shard.moments)
        if tensor.numel() > 0
    )
    everyone: list = [None] * rank.world_size
    torch.distributed.all_gather_object(everyone, held)
    return summary.bytes_per_rank, [everyone[member] for member in mesh.groups[0]]


def build_with_another_seed(config: TrainConfig, dataset: Path, odd_rank: int) -> None:
    """Set up an engine, one rank with another seed than the others."""
    with process_group(CPU) as rank:
        config.seed += rank.rank == odd_rank
        build_engine(config, open_dataset(dataset), rank, CPU)


def start_with_faults(
    cases: list[tuple[TrainConfig, str]], dataset: Path, rank_at_fault: int
) -> list[list[str | None]]:
    """What each rank is told before its first step if one rank's tables or layers are not as the others'."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        return [_start_with_a_fault(config, fault, dataset, rank_at_fault, rank) for config, fault in cases]


def _start_with_a_fault(config, fault, dataset, rank_at_fault, rank) -> list[str | None]:
    engine = build_engine(config, open_dataset(dataset), rank, CPU)
    mesh = Mesh(rank.world_size, config.parallelism.num_groups, config.parallelism.replicas)
    plan, shapes = engine.placement, dict(engine.table_shapes)
    if rank.rank == rank_at_fault:
        shard = local_shards(engine.model)[0]
        if fault == "weight":
            shard.weight[-1, -1] += 1e-6
        if fault == "dense":
            dense = dict(engine.model.named_parameters())
            next(value for name, value in dense.items() if "over_arch" in name).data.view(-1)[0] += 1e-6
    if fault == "shape":
        # As if the model had a row more than the kernels hold.
        shapes["t_C1"] = (shapes["t_C1"][0] + 1, shapes["t_C1"][1])
    try:
        check_start(engine.model, plan, mesh, shapes)
        told = None
    except RuntimeError as error:
        told = str(error)
    everyone: list = [None] * rank.world_size
    torch.distributed.all_gather_object(everyone, told)
    return everyone


def upstream_layouts(layouts: list[tuple[int, bool]]) -> list[list[list[int]]]:
    """The rank layouts that DMPCollection itself makes of a number of groups, inter-host or not: its device mesh."""
    meshes = []
    with process_group(CPU) as rank:
        for num_groups, inter_host in layouts:
            collection = Sparse2D.__new__(Sparse2D)
            nn.Module.__init__(collection)
            collection._device = CPU
            mesh, _, _ = collection._create_process_groups(
                global_rank=rank.rank,
                world_size=rank.world_size,
                local_size=rank.world_size // num_groups,
                use_inter_host_allreduce=inter_host,
            )
            meshes.append(mesh.mesh.tolist())
            # A rank that leaves while others still connect would end their groups.
            torch.distributed.barrier()
    return meshes


def echo_rank() -> dict[str, str | None]:
    """Where a rank finds itself."""
    return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def fail_on_rank(failing: int, how: str) -> None:
    """One rank fails; the others wait in a collective."""
    with process_group(CPU) as rank:
        torch.distributed.barrier()
        if rank.rank == failing:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "user":
                raise UserError("id 7 of feature C3 is not below its limit 5")
            raise KeyError("the root cause")
        torch.distributed.barrier()
        time.sleep(60)


def busy_teardown(failing: int, seconds: float) -> None:
    """One rank fails and takes its time to close after its peers have lost it."""
    try:
        fail_on_rank(failing, "raise")
    except KeyError:
        time.sleep(seconds)
        raise
