"""What the testbed tells the ranks inside it of their network, for their record."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

# Holds a ``Description`` as JSON.
DESCRIPTION = "SPARSE2D_TESTBED"


@dataclass
class TestbedConfig:
    """H hosts of R ranks, and the bandwidth of each host's link to the others, in either direction."""

    hosts: int = 2
    ranks_per_host: int = 2
    inter_host_mbit: float = 100.0

    # Not a test, whatever pytest thinks of its name.
    __test__ = False


@dataclass(frozen=True)
class Link:
    """A measured connection: throughput of one TCP stream, and the median round trip of one byte."""

    mbit: float
    rtt_ms: float


@dataclass(frozen=True)
class Description:
    """The testbed as it was asked for, and its links as they were measured before the ranks started."""

    config: TestbedConfig
    inter_host: Link | None
    intra_host: Link

    def environment(self) -> dict[str, str]:
        """For the ranks."""
        return {DESCRIPTION: json.dumps(asdict(self))}


def description_here() -> dict[str, Any] | None:
    """The description of the testbed that this process runs in; None outside of one."""
    text = os.environ.get(DESCRIPTION)
    return None if text is None else dict(json.loads(text))
