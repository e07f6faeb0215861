"""Hosts as network namespaces on a bridge, their links shaped in both directions."""

import json
import subprocess
from collections.abc import Sequence

from sparse2d.testbed.description import TestbedConfig

SWITCH = "switch"
INTERFACE = "eth0"
# A bucket that refills in 4 ms, the period of a slow timer, and holds the largest packet that TCP hands down.
BURST_S, MIN_BURST_BYTES = 0.004, 65_536
# Longest wait in a link's queue; beyond it packets are dropped, and TCP slows down.
QUEUE_MS = 50


def host_name(host: int) -> str:
    """Namespace of a host."""
    return f"host{host}"


def host_address(host: int) -> str:
    """Its address on the bridge."""
    return f"10.77.{host // 200}.{host % 200 + 1}"


def inside(host: int, command: Sequence[str]) -> list[str]:
    """The command that runs another one on a host."""
    return ["ip", "netns", "exec", host_name(host), *command]


def build(config: TestbedConfig) -> None:
    """Make and start all of it, in a sandbox: what is there already is none of its business."""
    _run("mount -t tmpfs none /run")
    _run(f"ip netns add {SWITCH}")
    _run(f"ip -n {SWITCH} link add bridge type bridge")
    _run(f"ip -n {SWITCH} link set bridge up")
    for host in range(config.hosts):
        name, port = host_name(host), f"port{host}"
        _run(f"ip netns add {name}")
        _run(f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {SWITCH}")
        _run(f"ip -n {SWITCH} link set {port} master bridge up")
        _run(f"ip -n {name} addr add {host_address(host)}/16 dev {INTERFACE}")
        for interface in ("lo", INTERFACE):
            _run(f"ip -n {name} link set {interface} up")
        # What a host sends leaves by its own interface, what it gets by the switch's port.
        for namespace, interface in ((name, INTERFACE), (SWITCH, port)):
            _run(f"tc -n {namespace} qdisc add dev {interface} root {shaping(config.inter_host_mbit)}")


def shaping(mbit: float) -> str:
    """Token bucket of a link, in tc's words."""
    bytes_per_s = mbit * 1e6 / 8
    burst = max(int(bytes_per_s * BURST_S), MIN_BURST_BYTES)
    return f"tbf rate {int(mbit * 1e6)}bit burst {burst} latency {QUEUE_MS}ms"


def sent_bytes(host: int) -> dict[str, int]:
    """Bytes that a host has sent so far through its loopback and its link."""
    links = json.loads(_run(f"ip -n {host_name(host)} -s -j link"))
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
