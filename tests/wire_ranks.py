"""Collectives and trainings on real ranks, what was counted beside what the loopback interface saw.

Run as a program it prints that as JSON; the test runs it in a network namespace of its own, where nothing else sends.
"""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from sparse2d.config import TrainConfig
from sparse2d.data.batch import to_torchrec
from sparse2d.data.dataset import open_dataset, train_batches
from sparse2d.engine import Engine, build_engine
from sparse2d.launch import run_ranks
from sparse2d.mesh import helper_group, process_group
from sparse2d.wire import WireCounter, wire_record

CPU = torch.device("cpu")
NUM_RANKS = 4
ELEMENTS = 240_000


def collectives(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Each collective of a training step on tensors of a megabyte, over which headers vanish."""
    part, whole = torch.ones(ELEMENTS), torch.ones(size * ELEMENTS)
    uneven = [ELEMENTS + 200_000 * ((rank + peer) % 2) for peer in range(size)]
    world = dist.group.WORLD
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "allreduce_coalesced": lambda: world.allreduce_coalesced([whole, part]).wait(),
        "all_gather": lambda: dist.all_gather([torch.empty_like(part) for _ in range(size)], part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty_like(part), list(whole.chunk(size))),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "all_to_all_uneven": lambda: dist.all_to_all_single(
            torch.empty(sum(uneven), 2), torch.ones(sum(uneven), 2), uneven, uneven
        ),
    }


def seen_and_counted(call: Callable[[], object], wire: WireCounter):
    """Bytes of all ranks by the interface and by the counters."""
    before = dict(wire.sent_bytes)
    dist.barrier()
    seen = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    dist.barrier()
    with wire.counting():
        call()
    dist.barrier()
    seen = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - seen
    dist.barrier()
    counted = torch.tensor(sum(wire.sent_bytes.values()) - sum(before.values()))
    dist.all_reduce(counted)
    return seen, counted.item()


def count_collectives() -> dict[str, tuple[float, float]]:
    """Seen and counted bytes of each collective."""
    with process_group(CPU) as rank, WireCounter() as wire:
        world = {name: seen_and_counted(call, wire) for name, call in collectives(rank.rank, rank.world_size).items()}
        group = helper_group()
        beside = seen_and_counted(lambda: dist.all_reduce(torch.ones(ELEMENTS), group=group), wire)
        return world | {"beside": beside}


def count_trainings(configs: dict[str, TrainConfig], dataset: Path, steps: int) -> dict[str, dict]:
    """The record of each training's bytes, with those that the interface saw."""
    torch.set_num_threads(1)
    records = {}
    with process_group(CPU) as rank:
        for name, config in configs.items():
            rows = open_dataset(dataset)
            engine = build_engine(config, rows, rank, CPU)
            batches = train_batches(rows, config.global_batch_size, rank.rank, rank.world_size, max_steps=steps)
            with WireCounter() as wire:
                if engine.averager is not None:
                    engine.averager.after_step = wire.averaging(engine.averager.after_step)
                seen, counted = seen_and_counted(lambda e=engine, b=batches: train(e, b), wire)
                averagings = len(engine.averager.durations_s) if engine.averager is not None else 0
                records[name] = wire_record(wire, steps, averagings) | {"seen": seen, "counted": counted}
            dense = (p.numel() for n, p in engine.model.named_parameters() if "embedding_bags" not in n)
            records[name]["dense_elements"] = sum(dense)
            records[name]["compression"] = {of: each.record() for of, each in engine.compressors.items()}
    return records


def train(engine: Engine, batches) -> None:
    for step, batch in enumerate(batches, start=1):
        engine.train_step(to_torchrec(batch, CPU), step)


if __name__ == "__main__":
    print(json.dumps(run_ranks(count_collectives, num_ranks=NUM_RANKS)))
