"""Milliseconds and bytes of one averaging: touched rows, all rows, and upstream's all-reduce, on real ranks over gloo.

For each number of ranks one job, in which every table size and every way takes its turn in each round, so that a busy
machine is busy for all. Bytes are what the loopback interface counted, of all ranks; ``make bench-sync`` runs in a
network namespace of its own where the system allows it, so that nothing else is counted.

    make bench-sync
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sparse2d.config import (
    OptimizerConfig,
    ParallelismConfig,
    ParallelismKind,
    ShardingKind,
    SyncConfig,
    SyncRows,
    TableOptimizer,
    WireDtype,
)
from sparse2d.launch import run_ranks
from sparse2d.mesh import Mesh, process_group
from sparse2d.optimizers.fused import table_sharder
from sparse2d.parallel import shard_model
from sparse2d.parallel.plans import make_plan
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.records import write_atomically
from sparse2d.sync.averaging import ReplicaAverager
from sparse2d.sync.rows import ShardRows
from sparse2d.sync.touched import TouchedRows

CPU = torch.device("cpu")
DIM = 64
LOOKUPS = 8192
NUM_GROUPS = 4
OPTIMIZER = OptimizerConfig(TableOptimizer.rowwise_adagrad)
WAYS = {
    "touched": SyncConfig(rows=SyncRows.touched),
    "touched_bf16": SyncConfig(rows=SyncRows.touched, wire_dtype=WireDtype.bf16),
    "auto": SyncConfig(rows=SyncRows.auto),
    "all": SyncConfig(rows=SyncRows.all),
    "upstream": SyncConfig(rows=SyncRows.all),
}


def build(rows: dict[str, int], num_groups: int) -> nn.Module:
    """Tables alone, row-wise over the ranks of a group."""
    mesh = Mesh(dist.get_world_size(), num_groups)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=DIM, feature_names=[f"f_{name}"])
        for name, n in rows.items()
    ]
    module = nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    layout = ParallelismConfig(kind=ParallelismKind.sparse_2d, num_groups=num_groups, sharding=[ShardingKind.row_wise])
    sharder = table_sharder(OPTIMIZER, num_groups, CPU)
    sizes = {"group_size": mesh.group_size, "local_group_size": mesh.group_size, "rank_batch_size": LOOKUPS}
    plan = make_plan(module, sharder, layout, device=CPU, **sizes)
    return shard_model(module, layout, mesh, plan, sharder, CPU)


def lookup(model: nn.Module, rows: dict[str, int], rng: np.random.Generator) -> None:
    """One step of a rank: ``LOOKUPS`` uniformly drawn ids of every table, which repeat least, and the backward pass."""
    ids = torch.from_numpy(np.concatenate([rng.integers(0, n, LOOKUPS) for n in rows.values()]))
    lengths = torch.ones(LOOKUPS * len(rows), dtype=torch.int32)
    model(KeyedJaggedTensor([f"f_{name}" for name in rows], ids, lengths=lengths)).values().sum().backward()


def upstream_all_reduce(model: Sparse2D) -> Callable[[list[torch.Tensor]], None]:
    """What ``DMPCollection.sync`` does, were there an average in gloo: one coalesced all-reduce of whole tables."""

    def reduce(tensors: list[torch.Tensor]) -> None:
        model.replica_pg.allreduce_coalesced(tensors).wait()
        for tensor in tensors:
            tensor.div_(NUM_GROUPS)

    return reduce


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time every size and way in turn on this rank; rank 0's result holds the slowest rank's times."""
    quiet()
    with process_group(CPU) as rank:
        models = {size: build({"table": size}, NUM_GROUPS) for size in sizes}
        rng = np.random.default_rng(rank.rank)
        points: list[dict[str, Any]] = []
        for number in range(rounds + 1):
            for size, model in models.items():
                for way in WAYS:
                    ms, sent = average_once(model, way, size, rng)
                    point = {"rows": way, "table_rows": size, "num_ranks": rank.world_size, "round": number}
                    points.append(point | {"ms": ms, "bytes": sent / rank.world_size})
        return [point for point in points if point["round"] > 0]  # the first round warms up


def average_once(model: Sparse2D, way: str, table_rows: int, rng: np.random.Generator) -> tuple[float, int]:
    """One step and its averaging: milliseconds of the slowest rank, and bytes that all ranks sent."""
    averager = ReplicaAverager(model, WAYS[way], OPTIMIZER)
    if way == "upstream":
        model.set_all_reduce_hook(upstream_all_reduce(model))
    lookup(model, {"table": table_rows}, rng)
    dist.barrier()
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    dist.barrier()
    start = time.perf_counter()
    averager.average()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.barrier()
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item() * 1e3, sent


def track(steps: int) -> dict[str, float]:
    """Milliseconds a step that recording and reading touched rows costs: TorchRec's tracker and our hook, 26 tables."""
    quiet()
    with process_group(CPU):
        rows = {f"t{i}": 100_000 for i in range(26)}
        models = {name: build(rows, 1) for name in ("none", "hook", "model_delta_tracker")}
        hook = TouchedRows(ShardRows(models["hook"]))
        tracker = ModelDeltaTrackerTrec(models["model_delta_tracker"])
        durations: dict[str, list[float]] = {name: [] for name in models}
        for step in range(steps):
            for name, model in models.items():
                rng = np.random.default_rng(step)
                start = time.perf_counter()
                lookup(model, rows, rng)
                if name == "hook":
                    hook.take()
                if name == "model_delta_tracker":
                    tracker.get_unique_ids()
                    tracker.step()
                durations[name].append(time.perf_counter() - start)
        plain = np.array(durations.pop("none"))
        return {name: float(np.median(np.array(seconds) - plain)) * 1e3 for name, seconds in durations.items()}


def quiet() -> None:
    """One thread a rank, and TorchRec's remarks left out."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main(sizes: list[int], ranks: list[int], rounds: int) -> pd.DataFrame:
    """Measure everything; one line for each number of ranks, size and way."""
    table = pd.DataFrame(
        [point for num_ranks in ranks for point in run_ranks(measure, sizes, rounds, num_ranks=num_ranks)]
    )
    # Ratios within a round, since a machine may be busier in another.
    same_size, same_way = ["num_ranks", "table_rows", "round"], ["num_ranks", "rows", "round"]
    all_rows = table[table["rows"] == "all"].set_index(same_size).ms.rename("all_ms")
    first = table[table.table_rows == sizes[0]].set_index(same_way).ms.rename("first_ms")
    table = table.join(all_rows, on=same_size).join(first, on=same_way)
    table["ratio_to_all"] = table.ms / table.all_ms
    table["ratio_to_first_size"] = table.ms / table.first_ms
    columns = ["ms", "bytes", "ratio_to_all", "ratio_to_first_size"]
    groups = table.groupby(["num_ranks", "table_rows", "rows"], sort=False)[columns]
    result = groups.median().join(groups.std().add_suffix("_std")).assign(n=groups.size()).reset_index()
    result.insert(0, "label", "measured")
    return result.assign(num_groups=NUM_GROUPS, dim=DIM, lookups_per_rank=LOOKUPS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        help="rows; ratios are to the first",
        default=[300_000, 100_000, 1_000_000, 3_000_000],
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--track-steps", type=int, default=30, help="steps that recording touched rows is timed over")
    parser.add_argument("--results-dir", type=Path, default=Path(__file__).parents[2] / "results")
    arguments = parser.parse_args()
    tracked = run_ranks(track, arguments.track_steps, num_ranks=1)
    print("recording and reading touched rows, 26 tables x 8192 lookups, ms a step:", tracked)
    result = main(arguments.sizes, arguments.ranks, arguments.rounds)
    table = arguments.results_dir / "tables" / "sync_cost.csv"
    write_atomically(table, result.to_csv(index=False, float_format="%.6g"))
    print(result.to_string(index=False))
