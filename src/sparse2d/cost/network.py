"""How long collectives take: alpha-beta models with the rates of two kinds of links."""

import math
from dataclasses import dataclass

import numpy as np

from sparse2d.config import Replicas
from sparse2d.cost.config import HardwareConfig
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


def all_to_all_s(traffic: Traffic, hardware: HardwareConfig, efficiency: float, local_peers: int, peers: int) -> float:
    """Seconds of one all-to-all in a group: until its slowest rank is done.

    Both kinds of links work at once. Each message to a remote peer costs what ``half_rate_message_kb`` more bytes
    would; congestion lowers the rate as a group spans more hosts.

    Args:
        traffic: of all ranks.
        hardware: rates.
        efficiency: share of the network interface's rate that large messages reach.
        local_peers: other ranks of the group on the same host.
        peers: other ranks of the group.
    """
    if peers == 0:
        return 0.0
    remote_peers = peers - local_peers
    hosts = (peers + 1) / (local_peers + 1)
    rate = hardware.nic_gb_per_s * GB * efficiency
    if hardware.congestion_half_hosts is not None:
        rate /= 1 + (hosts - 1) / hardware.congestion_half_hosts
    remote = np.maximum(traffic.sent_remote, traffic.received_remote).max()
    overhead = remote_peers * hardware.half_rate_message_kb * 1e3 if remote > 0 else 0.0
    local = np.maximum(traffic.sent_local, traffic.received_local).max()
    local_s = local / (hardware.host_gb_per_s * GB * hardware.host_efficiency)
    return float(max((remote + overhead) / rate, local_s)) + hardware.latency_us * 1e-6


def all_reduce_s(num_bytes: float, ranks: int, ranks_per_host: int, hardware: HardwareConfig) -> float:
    """Seconds of a ring all-reduce of ``num_bytes`` on each of ``ranks`` ranks, ``ranks_per_host`` of them on a host.

    Rings of all ranks of a host leave it through their own network interfaces, so that what crosses hosts flows at
    the sum of these rates, and never faster than inside a host.
    """
    if ranks <= 1 or num_bytes == 0:
        return 0.0
    rate = hardware.host_gb_per_s * hardware.host_efficiency
    if ranks > ranks_per_host:
        rate = min(rate, ranks_per_host * hardware.nic_gb_per_s * hardware.nic_efficiency)
    latency = 2 * math.ceil(math.log2(ranks)) * hardware.latency_us * 1e-6
    return 2 * (ranks - 1) / ranks * num_bytes / (rate * GB) + latency


def replicas_per_host(mesh: Mesh, gpus_per_host: int) -> int:
    """How many of the M replicas of a shard share a host (the fewest, where hosts and groups do not divide)."""
    if mesh.replicas is Replicas.inter_host:
        if gpus_per_host % mesh.group_size:
            return 1
        return min(mesh.num_groups, gpus_per_host // mesh.group_size)
    return math.gcd(mesh.num_groups, gpus_per_host)
