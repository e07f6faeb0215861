"""Times what a training step is made of on all ranks of a testbed at once; torchrun starts it on each host.

Ranks of a testbed share the machine's cores, so that each number is of all ranks being busy with the same.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from sparse2d.mesh import RankInfo, process_group
from sparse2d.testbed.description import description_here
from sparse2d.testbed.hardware import Seconds, hardware_lines

CPU = torch.device("cpu")
REPETITIONS = 15


def median_s(call: Callable[[], object]) -> float:
    """Seconds of a call on the slowest rank, median of some; a collective over all ranks."""
    seconds: list[float] = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        call()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds.append(taken.item())
    return statistics.median(seconds)


def measure(rank: RankInfo) -> Seconds:
    """Seconds of collectives and of computing; a collective over all ranks."""
    size, local = rank.world_size, rank.local_world_size
    hosts = [dist.new_group(range(first, first + local)) for first in range(0, size, local)]
    host = hosts[rank.rank // local]
    large, small = torch.ones(Seconds.LARGE), torch.ones(Seconds.SMALL)
    square = torch.ones(Seconds.MATRIX, Seconds.MATRIX)
    bag = torch.nn.EmbeddingBag(Seconds.TABLE_ROWS, Seconds.DIM, mode="sum")
    ids = torch.randint(Seconds.TABLE_ROWS, (Seconds.LOOKUPS, 1))

    def all_to_all(values: int) -> Callable[[], object]:
        send, receive = torch.ones(size * values), torch.empty(size * values)
        return lambda: dist.all_to_all_single(receive, send)

    with torch.no_grad():
        return Seconds(
            all_reduce_small=median_s(lambda: dist.all_reduce(small)),
            all_reduce_large=median_s(lambda: dist.all_reduce(large)),
            all_to_all_small=median_s(all_to_all(Seconds.TO_EACH_SMALL)),
            all_to_all_large=median_s(all_to_all(Seconds.TO_EACH_LARGE)),
            host_all_reduce_large=median_s(lambda: dist.all_reduce(large, group=host)),
            matmul=median_s(lambda: square @ square),
            lookup=median_s(lambda: bag(ids)),
        )


def main() -> None:
    """Rank 0 prints the lines of a hardware file."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank:
        found = measure(rank)
        if rank.is_first:
            testbed = description_here()
            assert testbed is not None
            print(json.dumps(found.__dict__), file=sys.stderr)
            print(hardware_lines(found, testbed), flush=True)


if __name__ == "__main__":
    main()
