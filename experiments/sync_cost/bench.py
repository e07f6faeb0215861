"""Milliseconds and bytes of one averaging: touched rows, all rows, and upstream's all-reduce, on real ranks over gloo.

For each table size and number of ranks one job, in which every way takes its turn in each round, so that a busy machine
is busy for all. Bytes are what the loopback interface counted, of all ranks; ``make bench-sync`` runs in a network
namespace of its own where the system allows it, so that nothing else is counted.

    make bench-sync
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path

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
from sparse2d.sync.averaging import ReplicaAverager
from sparse2d.sync.rows import ShardRows
from sparse2d.sync.touched import TouchedRows

TABLES = Path(__file__).parents[2] / "results" / "tables"
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


def measure(table_rows: int, rounds: int) -> list[dict[str, float | str | int]]:
    """Time every way in turn on this rank; rank 0's result holds the slowest rank's times."""
    quiet()
    with process_group(CPU) as rank:
        rows = {"table": table_rows}
        model = build(rows, NUM_GROUPS)
        rng = np.random.default_rng(rank.rank)
        points = []
        for number in range(rounds + 1):
            for way, config in WAYS.items():
                averager = ReplicaAverager(model, config)
                if way == "upstream":
                    model.set_all_reduce_hook(upstream_all_reduce(model))
                lookup(model, rows, rng)
                dist.barrier()
                sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
                dist.barrier()
                start = time.perf_counter()
                averager.average()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.barrier()
                sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                point = {"rows": way, "table_rows": table_rows, "num_ranks": rank.world_size, "round": number}
                points.append(point | {"ms": seconds.item() * 1e3, "bytes": sent / rank.world_size})
        return [point for point in points if point["round"] > 0]  # the first round warms up


def track(steps: int) -> dict[str, float]:
    """Milliseconds a step that recording and reading touched rows costs: TorchRec's tracker and our hook, 26 tables."""
    quiet()
    with process_group(CPU):
        rows = {f"t{i}": 100_000 for i in range(26)}
        seconds = {}
        for name in ("none", "hook", "model_delta_tracker"):
            model = build(rows, 1)
            rng = np.random.default_rng(0)
            hook = TouchedRows(ShardRows(model)) if name == "hook" else None
            tracker = ModelDeltaTrackerTrec(model) if name == "model_delta_tracker" else None
            durations = []
            for _ in range(steps):
                start = time.perf_counter()
                lookup(model, rows, rng)
                if hook is not None:
                    hook.take()
                if tracker is not None:
                    tracker.get_unique_ids()
                    tracker.step()
                durations.append(time.perf_counter() - start)
            seconds[name] = float(np.median(durations))
        return {name: (value - seconds["none"]) * 1e3 for name, value in seconds.items() if name != "none"}


def quiet() -> None:
    """One thread a rank, and TorchRec's remarks left out."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main(sizes: list[int], ranks: list[int], rounds: int) -> pd.DataFrame:
    """Measure everything; one line for each way, size and number of ranks."""
    points = []
    for num_ranks in ranks:
        for size in sizes:
            points += run_ranks(measure, size, rounds, num_ranks=num_ranks)
            print(pd.DataFrame(points[-rounds * len(WAYS) :]).groupby("rows", sort=False)[["ms", "bytes"]].median())
    table = pd.DataFrame(points)
    keys = ["num_ranks", "table_rows"]
    of_all = table[table["rows"] == "all"].set_index([*keys, "round"]).ms.rename("all_ms")
    table = table.join(of_all, on=[*keys, "round"])
    table["ratio_to_all"] = table.ms / table.all_ms
    groups = table.groupby([*keys, "rows"], sort=False)[["ms", "bytes", "ratio_to_all"]]
    result = groups.median().join(groups.std().add_suffix("_std")).assign(n=groups.size()).reset_index()
    result.insert(0, "label", "measured")
    return result.assign(num_groups=NUM_GROUPS, dim=DIM, lookups_per_rank=LOOKUPS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000, 3_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    result = main(arguments.sizes, arguments.ranks, arguments.rounds)
    TABLES.mkdir(parents=True, exist_ok=True)
    result.to_csv(TABLES / "sync_cost.csv", index=False, float_format="%.6g")
    print(result.to_string(index=False))
    tracked = run_ranks(track, 30, num_ranks=1)
    print("recording and reading touched rows, 26 tables x 8192 lookups, ms a step:", tracked)
