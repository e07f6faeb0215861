"""What a host of the testbed sends, by its interfaces' own counters: seen from its ranks, in its network namespace."""

from typing import Any

import psutil
import torch.distributed as dist

from sparse2d.mesh import rank_from_env
from sparse2d.testbed.description import description_here
from sparse2d.testbed.network import INTERFACE

LINKS = {"lo": "inside_host", INTERFACE: "between_hosts"}


class LinkCounters:
    """Bytes sent between two readings, headers and acknowledgements included; nothing outside of the testbed.

    On another machine the interfaces are not ours alone, and a NIC of InfiniBand is not among them.
    """

    def __init__(self) -> None:
        self._readings: list[dict[str, int]] = []

    def read(self) -> None:
        """Take a reading while no rank sends; a collective, and the ranks leave it together."""
        dist.barrier()
        if description_here() is None:
            return
        counters = psutil.net_io_counters(pernic=True)
        self._readings.append({link: counters[name].bytes_sent for name, link in LINKS.items()})
        dist.barrier()

    def record(self, steps: int) -> dict[str, Any]:
        """Bytes that a host sent a step between the first and the last reading, mean and maximum over the hosts.

        Args:
            steps: between them; a collective over all ranks.
        """
        rank = rank_from_env()
        if description_here() is None or rank is None or len(self._readings) < 2 or not steps:
            return {}
        first, last = self._readings[0], self._readings[-1]
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, (rank.local_rank, {link: last[link] - first[link] for link in first}))
        hosts = [sent for local_rank, sent in everyone if local_rank == 0]
        return {
            "link_bytes_per_step": {
                link: {"mean": sum(host[link] for host in hosts) / len(hosts) / steps, "max": most / steps}
                for link in first
                for most in [max(host[link] for host in hosts)]
            }
        }
