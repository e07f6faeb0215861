"""The first process of a sandbox: builds the network, measures it, and runs one torchrun on each host."""

import json
import os
import subprocess
import sys
import time

from sparse2d.preemption import EXIT_CODE
from sparse2d.testbed.description import Description, Link, TestbedConfig
from sparse2d.testbed.network import INTERFACE, build, host_address, host_name, inside, sent_bytes
from sparse2d.testbed.sandbox import GRACE_S, hold_lifeline

PORT = 29_500
PROBE_S = 1.0
PROBE = [sys.executable, "-m", "sparse2d.testbed.probe"]


def main(config: TestbedConfig, module: str, arguments: list[str]) -> int:
    """Run a module, a rank of it being a process, on all hosts; returns the first exit code that is not 0."""
    torchruns: list[subprocess.Popen[bytes]] = []
    hold_lifeline(lambda: end_in_order(torchruns))
    build(config)
    inter_host = measured(0, 1) if config.hosts > 1 else None
    description = Description(config, inter_host, measured(0, 0))
    print(f"sparse2d.testbed: {told(description)}", file=sys.stderr, flush=True)
    # The probes are no part of what the ranks send.
    before = [sent_bytes(host) for host in range(config.hosts)]
    environment = os.environ | description.environment() | {"GLOO_SOCKET_IFNAME": INTERFACE}
    # gloo announces each connection.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("OMP_NUM_THREADS", "1")
    torchruns += [
        subprocess.Popen(inside(host, torchrun(config, host, module, arguments)), env=environment)
        for host in range(config.hosts)
    ]
    code = wait_for_all(torchruns)
    for host in range(config.hosts):
        sent = ", ".join(f"{name} {count - before[host][name]}" for name, count in sent_bytes(host).items())
        print(f"sparse2d.testbed: {host_name(host)} sent bytes: {sent}", file=sys.stderr, flush=True)
    return code


def end_in_order(torchruns: list[subprocess.Popen[bytes]]) -> None:
    """Have the ranks close their records; nothing is lost before there are any."""
    if not torchruns:
        os._exit(EXIT_CODE)
    for process in torchruns:
        process.terminate()


def torchrun(config: TestbedConfig, host: int, module: str, arguments: list[str]) -> list[str]:
    """The command that starts a host's ranks."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(config.hosts), "--node-rank", str(host), "--nproc-per-node", str(config.ranks_per_host)),
        *("--master-addr", host_address(0), "--master-port", str(PORT), "--local-addr", host_address(host)),
        *("-m", module, *arguments),
    ]


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for torchruns; once one has failed the others get a while to notice that."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.returncode for process in processes):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return next((process.returncode for process in processes if process.returncode), 0)


def measured(server: int, client: int) -> Link:
    """The link from one host to another one, or inside a host."""
    address = host_address(server)
    serving = subprocess.Popen(inside(server, [*PROBE, "serve", address]))
    answer = subprocess.run(
        inside(client, [*PROBE, "measure", address, str(PROBE_S)]), check=True, capture_output=True, text=True
    )
    serving.wait()
    return Link(**json.loads(answer.stdout))


def told(description: Description) -> str:
    """One line about the network."""
    config = description.config
    links = {"between hosts": description.inter_host, "inside a host": description.intra_host}
    shown = [
        f"{link.mbit:.0f} Mbit/s, {link.rtt_ms:.2f} ms {where}" for where, link in links.items() if link is not None
    ]
    return f"{config.hosts} hosts x {config.ranks_per_host} ranks, measured: " + "; ".join(shown)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.exit(main(TestbedConfig(**asked["config"]), asked["module"], asked["arguments"]))
