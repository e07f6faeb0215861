"""Ranks and groups: the one module that reads RANK/WORLD_SIZE and creates process groups.

T ranks = M groups (replicas of every table shard) x N ranks (arXiv 2508.03854, section 3).
"""

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sparse2d.config import Replicas
from sparse2d.errors import UserError

if TYPE_CHECKING:
    import torch

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Worlds that this process has joined so far: a sweep under torchrun joins one for each job.
_worlds = itertools.count()
# Describes groups whose collectives are no part of a training step.
HELPER = "helper"
# Description of the group that compressed dense gradients are sent in.
DENSE = "dense"


@dataclass(frozen=True)
class RankInfo:
    """This process among all ranks, as torchrun, srun through torchrun, or our own launcher set it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    # How often the launcher has started the ranks again.
    restart_count: int = 0

    @property
    def is_first(self) -> bool:
        """Rank 0 logs, records and tracks."""
        return self.rank == 0


def rank_from_env() -> RankInfo | None:
    """The rank that the launcher's environment variables describe; None when started plainly.

    Raises:
        UserError: if one of them is no whole number, or the rank is not in its world.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    info = RankInfo(
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK", "0"),
        local_world_size=_number("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]),
        restart_count=_number("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    if not 0 <= info.rank < info.world_size:
        raise UserError(f"RANK={info.rank} is not in 0 to WORLD_SIZE - 1 = {info.world_size - 1}; unset both, or fix")
    return info


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise UserError(f"environment variable {name}={text!r} is not a whole number; unset it to start ranks here")
    return int(text)


@contextmanager
def process_group(device: "torch.device") -> Iterator[RankInfo]:
    """Join the world for the duration of the block: gloo on CPU, NCCL (with gloo for host tensors) on CUDA."""
    # Not at the top: entry points that only ask for their rank start without torch.
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    info = rank_from_env()
    if info is None:
        raise RuntimeError("process_group needs RANK and WORLD_SIZE; start ranks with sparse2d.launch or torchrun")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store, _, _ = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    dist.init_process_group(
        backend,
        # The launcher's store outlives worlds and attempts: the next one would find addresses of ranks long gone.
        store=dist.PrefixStore(f"attempt_{info.restart_count}/world_{next(_worlds)}", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    try:
        yield info
    finally:
        dist.destroy_process_group()


def dense_group() -> "torch.distributed.ProcessGroup":
    """All ranks once more, for compressed gradients of the dense part; a collective."""
    import torch.distributed as dist

    return dist.new_group(timeout=COLLECTIVE_TIMEOUT, group_desc=DENSE)


def helper_group() -> "torch.distributed.ProcessGroup":
    """All ranks once more, over gloo, for what goes on beside training; a collective."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc=HELPER)


@dataclass(frozen=True)
class Mesh:
    """T = M x N and which global rank sits where.

    Raises:
        UserError: if the number of groups does not divide the world size.
    """

    world_size: int
    num_groups: int
    replicas: Replicas = Replicas.intra_host

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.world_size % self.num_groups != 0:
            divisors = [m for m in range(1, self.world_size + 1) if self.world_size % m == 0]
            raise UserError(
                f"parallelism.num_groups={self.num_groups} does not divide the world size of {self.world_size} ranks; "
                f"choose one of {divisors}"
            )

    @property
    def group_size(self) -> int:
        """N, the ranks that share one copy of the tables."""
        return self.world_size // self.num_groups

    @property
    def groups(self) -> list[list[int]]:
        """Global ranks of each group: M lists of N.

        ``intra_host``: group g = [g, M+g, 2M+g, ...], so the M replicas of a shard are neighbours;
        ``inter_host``: contiguous groups. The same layouts as ``DMPCollection._create_process_groups``.
        """
        m, n = self.num_groups, self.group_size
        if self.replicas is Replicas.inter_host:
            return [list(range(g * n, (g + 1) * n)) for g in range(m)]
        return [list(range(g, self.world_size, m)) for g in range(m)]

    def group_of(self, rank: int) -> int:
        """Index of the group that a global rank belongs to."""
        return next(g for g, ranks in enumerate(self.groups) if rank in ranks)

    def local_group_size(self, local_world_size: int) -> int:
        """How many ranks of one group share a host: what the planner must take as its ``local_world_size``.

        Where hosts and groups do not divide each other, the largest number of consecutive ranks of a group, of which
        each run shares a host.
        """
        if self.replicas is Replicas.inter_host:
            return math.gcd(self.group_size, local_world_size)
        ranks, remainder = divmod(local_world_size, self.num_groups)
        return 1 if remainder else math.gcd(self.group_size, ranks)


@contextmanager
def host_process_groups(mesh: Mesh, local_group_size: int) -> Iterator[None]:
    """Let TorchRec build table-row-wise and grid shards inside the block (a collective over all T ranks).

    They need, inside each group, the ranks that share a host (``intra``) and those with the same place on each host
    (``cross``). Left alone, TorchRec derives both from LOCAL_WORLD_SIZE, which counts all groups' ranks on a host, and
    keeps the first ones for the life of the process, whatever mesh comes next.
    """
    import torch.distributed as dist
    from torchrec.distributed import comm

    size = local_group_size
    hosts = [ranks[first : first + size] for ranks in mesh.groups for first in range(0, mesh.group_size, size)]
    places = [ranks[place::size] for ranks in mesh.groups for place in range(size)]
    intra, _ = dist.new_subgroups_by_enumeration(hosts)
    cross, _ = dist.new_subgroups_by_enumeration(places)
    ours = {"_INTRA_PG": intra, "_CROSS_PG": cross, "_INTRA_PG_2D": intra, "_CROSS_PG_2D": cross}
    for name, value in (ours | {"_NODE_GROUP_SIZE_2D": size}).items():
        setattr(comm, name, value)
    try:
        yield
    finally:
        for name in (*ours, "_NODE_GROUP_SIZE_2D"):
            setattr(comm, name, None)
