"""How long collectives take: alpha-beta models with the rates of two kinds of links."""

import math
from dataclasses import astuple, dataclass

import numpy as np

from sparse2d.config import Replicas
from sparse2d.cost.config import Collectives, HardwareConfig
from sparse2d.cost.workload import Floats
from sparse2d.mesh import Mesh

GB = 1e9


@dataclass(frozen=True)
class Traffic:
    """Bytes of each rank of a group in one all-to-all: sent and received, inside the host and between hosts [N]."""

    sent_local: Floats
    sent_remote: Floats
    received_local: Floats
    received_remote: Floats

    @property
    def sent(self) -> Floats:
        """To all others."""
        return self.sent_local + self.sent_remote

    @property
    def received(self) -> Floats:
        """From all others."""
        return self.received_local + self.received_remote

    def __sub__(self, other: "Traffic") -> "Traffic":
        """The rest, without what rounding leaves of nothing."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Traffic(*(np.where(whole - part < 1e-6 * whole, 0.0, whole - part) for whole, part in pairs))


def all_to_all_s(traffic: Traffic, hardware: HardwareConfig, efficiency: float, mesh: Mesh) -> float:
    """Seconds of one all-to-all in each group, all groups at once: until the slowest rank is done.

    Both kinds of links work at once. Each message to a remote peer, an empty one (gloo's alltoallv sends it) too, costs
    what ``half_rate_message_kb`` more bytes would; congestion lowers the rate as a group spans more hosts.

    Args:
        traffic: of all ranks of one group.
        hardware: rates.
        efficiency: share of the network interface's rate that large messages reach.
        mesh: which ranks share an interface.
    """
    peers, gpus_per_host = mesh.group_size - 1, min(hardware.gpus_per_host, mesh.world_size)
    if peers == 0:
        return 0.0
    local_peers = mesh.local_group_size(gpus_per_host) - 1
    hosts = mesh.group_size / (local_peers + 1)
    rate = hardware.nic_gb_per_s * GB * efficiency
    if hardware.congestion_half_hosts is not None:
        rate /= 1 + (hosts - 1) / hardware.congestion_half_hosts
    overhead = (peers - local_peers) * hardware.half_rate_message_kb * 1e3

    def through_interface(remote: Floats) -> Floats:
        return _by_interface(remote + overhead, mesh, hardware.gpus_per_nic)

    remote = max(through_interface(traffic.sent_remote).max(), through_interface(traffic.received_remote).max())
    local = np.maximum(traffic.sent_local, traffic.received_local).max()
    local_s = local / (hardware.host_gb_per_s * GB * hardware.host_efficiency)
    return float(max(remote / rate, local_s)) + hardware.latency_us * 1e-6


def _by_interface(of_rank: Floats, mesh: Mesh, gpus_per_nic: int) -> Floats:
    """Sums over the GPUs, of whatever groups, that share an interface, from a value of each rank of a group [N]."""
    if gpus_per_nic == 1:
        return of_rank
    ranks = np.arange(mesh.world_size)
    # As in ``Mesh.groups``.
    place = ranks // mesh.num_groups if mesh.replicas is Replicas.intra_host else ranks % mesh.group_size
    sums: Floats = np.add.reduceat(of_rank[place], np.arange(0, mesh.world_size, gpus_per_nic))
    return sums


def all_reduce_s(num_bytes: float, ranks: int, ranks_per_host: int, hardware: HardwareConfig) -> float:
    """Seconds of a ring all-reduce of ``num_bytes`` on each rank, ``ranks_per_host`` of them on a host."""
    return ring_s(2 * (ranks - 1) / ranks * num_bytes, ranks, ranks_per_host, hardware, passes=2)


def ring_s(sent_bytes: float, ranks: int, ranks_per_host: int, hardware: HardwareConfig, passes: int = 1) -> float:
    """Seconds of a collective whose ranks send ``sent_bytes`` each to the next one in a ring.

    Rings of all ranks of a host leave it through the host's network interfaces, so that what crosses hosts flows at
    the sum of their rates (rings of other groups on the host take their share), and never faster than inside a host.

    Args:
        sent_bytes: by each rank.
        ranks: of the ring.
        ranks_per_host: of them.
        hardware: rates.
        passes: how often data go all the way around. For latency, NCCL takes trees where it pays.
    """
    if ranks <= 1 or sent_bytes == 0:
        return 0.0
    rate = hardware.host_gb_per_s * hardware.host_efficiency
    if ranks > ranks_per_host:
        through = ranks_per_host * hardware.nic_gb_per_s / hardware.gpus_per_nic
        rate = min(rate, through * hardware.nic_efficiency)
    hops = ranks - 1 if hardware.collectives is Collectives.gloo else math.ceil(math.log2(ranks))
    return sent_bytes / (rate * GB) + passes * hops * hardware.latency_us * 1e-6


def replicas_per_host(mesh: Mesh, gpus_per_host: int) -> int:
    """How many of the M replicas of a shard share a host (the fewest, where hosts and groups do not divide)."""
    if mesh.replicas is Replicas.inter_host:
        if gpus_per_host % mesh.group_size:
            return 1
        return min(mesh.num_groups, gpus_per_host // mesh.group_size)
    return math.gcd(mesh.num_groups, gpus_per_host)
