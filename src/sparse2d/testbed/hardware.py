"""What was timed on a testbed as a hardware file of the cost model, by turning the model's own formulas around."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import yaml

BYTES = 4
GB = 1e9
MBIT_IN_GB = 1e6 / 8 / GB


@dataclass(frozen=True)
class Seconds:
    """Of each call on the slowest rank, all ranks at once; sizes of the calls in fp32 values."""

    LARGE: ClassVar[int] = 2**19
    SMALL: ClassVar[int] = 2**4
    TO_EACH_LARGE: ClassVar[int] = 2**16
    TO_EACH_SMALL: ClassVar[int] = 2**10
    MATRIX: ClassVar[int] = 256
    TABLE_ROWS: ClassVar[int] = 200_000
    DIM: ClassVar[int] = 64
    LOOKUPS: ClassVar[int] = 20_000

    all_reduce_small: float
    all_reduce_large: float
    all_to_all_small: float
    all_to_all_large: float
    host_all_reduce_large: float
    matmul: float
    lookup: float


def hardware_numbers(seconds: Seconds, testbed: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Numbers of a hardware file, and the share of a link's rate that an all-to-all of large messages reaches.

    Args:
        seconds: as measured.
        testbed: as ``Description`` has it.
    """
    hosts, local = testbed["config"]["hosts"], testbed["config"]["ranks_per_host"]
    ranks = hosts * local
    link = testbed["inter_host"]["mbit"] * MBIT_IN_GB * GB
    hop = seconds.all_reduce_small / (2 * (ranks - 1))
    ring = 2 * (ranks - 1) / ranks * Seconds.LARGE * BYTES
    # Through a host's link go what its ranks send to all ranks of other hosts.
    pairs = local * (ranks - local)
    sent = pairs * (Seconds.TO_EACH_LARGE - Seconds.TO_EACH_SMALL) * BYTES
    all_to_all = sent / (seconds.all_to_all_large - seconds.all_to_all_small)
    half_rate = (seconds.all_to_all_small - hop) * all_to_all / pairs - Seconds.TO_EACH_SMALL * BYTES
    numbers = {
        "memory_gb": psutil.virtual_memory().total / GB / ranks,
        "memory_gb_per_s": Seconds.LOOKUPS * Seconds.DIM * BYTES / seconds.lookup / GB,
        "peak_tflops": 2 * Seconds.MATRIX**3 / seconds.matmul / 1e12,
        "gpus_per_host": local,
        "host_gb_per_s": 2 * (local - 1) / local * Seconds.LARGE * BYTES / seconds.host_all_reduce_large / GB,
        "nic_gb_per_s": link / GB,
        "nic_efficiency": min(1.0, ring / (seconds.all_reduce_large - seconds.all_reduce_small) / link),
        "gpus_per_nic": local,
        "half_rate_message_kb": max(half_rate, 1.0) / 1e3,
        "latency_us": 1e6 * hop,
    }
    return numbers, min(1.0, all_to_all / link)


def hardware_lines(seconds: Seconds, testbed: dict[str, Any]) -> str:
    """The file's text, each number with its source."""
    numbers, all_to_all = hardware_numbers(seconds, testbed)
    config = testbed["config"]
    rounded = {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in numbers.items()}
    command = (
        f"python -m sparse2d.testbed measure hosts={config['hosts']} ranks_per_host={config['ranks_per_host']} "
        f"inter_host_mbit={config['inter_host_mbit']:g}"
    )
    ranks = config["hosts"] * config["ranks_per_host"]
    content = {
        "name": "cpu_testbed",
        **rounded,
        "usable_memory_share": 0.85,
        "lookup_efficiency": 1.0,
        "host_efficiency": 1.0,
        "collectives": "gloo",
        "congestion_half_hosts": None,
        "slow_host_share": 0.0,
        "slow_host_excess": 0.0,
        "sources": [
            f"nic_gb_per_s: one TCP stream between two hosts, by {command}",
            "gpus_per_nic, gpus_per_host: all ranks of a host share its link",
            "latency_us: all-reduce of 64 bytes over all ranks, for each hop of its ring, by the same command",
            "nic_efficiency: all-reduce of 2 MB over all ranks beside one of 64 bytes, by the same command",
            "half_rate_message_kb: all-to-all of 4 kB to each rank beside one of 256 kB, by the same command",
            "host_gb_per_s: all-reduce of 2 MB inside each host, in all at once (host_efficiency=1)",
            f"memory_gb_per_s: {Seconds.LOOKUPS} lookups of {Seconds.DIM} columns on all ranks at once "
            "(lookup_efficiency=1), by the same command",
            f"peak_tflops: {Seconds.MATRIX} x {Seconds.MATRIX} matrix products on all ranks at once, same command",
            f"memory_gb: of the machine over {ranks} ranks; its {os.cpu_count()} cores are shared by them",
            "usable_memory_share=0.85: as sparse2d.train plans on the CPU; collectives: gloo, as training uses them",
            "congestion_half_hosts, slow_host_share, slow_host_excess: none; the hosts are one machine",
        ],
    }
    text = yaml.safe_dump(content, sort_keys=False, width=200)
    head = f"# Hosts in miniature (sparse2d.testbed), measured by: {command}\n"
    return f"{head}{text}# alltoall_efficiency (conf/constants/cpu_testbed.yaml): {all_to_all:.3f}"
