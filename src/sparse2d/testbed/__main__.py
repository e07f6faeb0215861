"""``python -m sparse2d.testbed run hosts=4 ranks_per_host=2 inter_host_mbit=100 -- experiment=...``.

run      trains on hosts in miniature: what follows ``--`` is what ``sparse2d.train`` takes
measure  prints rates and latencies of such hosts, as a hardware file of the cost model
clean    ends what a testbed has left behind
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse2d.cli import explain
from sparse2d.errors import UserError
from sparse2d.preemption import terminate
from sparse2d.testbed.description import TestbedConfig
from sparse2d.testbed.sandbox import clean, run_in_sandbox

MAX_HOSTS = 64


def parse(options: Sequence[str]) -> TestbedConfig:
    """Typed options from ``name=value`` texts.

    Raises:
        UserError: if a name is unknown or a value makes no sense.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TestbedConfig), OmegaConf.from_dotlist(list(options)))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, TestbedConfig)) from None
    assert isinstance(config, TestbedConfig)
    if not 1 <= config.hosts <= MAX_HOSTS:
        raise UserError(f"hosts={config.hosts} must be in 1 to {MAX_HOSTS}")
    if config.ranks_per_host < 1:
        raise UserError(f"ranks_per_host={config.ranks_per_host} must be at least 1")
    if not 0.1 <= config.inter_host_mbit <= 100_000:
        raise UserError(f"inter_host_mbit={config.inter_host_mbit} must be in 0.1 to 100000")
    return config


def main(arguments: Sequence[str]) -> int:
    """Run or clean; returns the exit code."""
    own, _, overrides = _split(arguments)
    parser = argparse.ArgumentParser(
        "sparse2d.testbed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["run", "measure", "clean"])
    parser.add_argument("options", nargs="*", metavar="option=value", help="hosts, ranks_per_host, inter_host_mbit")
    parsed = parser.parse_args(own)
    if parsed.command == "clean":
        print(f"ended {clean()} processes of testbeds whose tool is gone")
        return 0
    config = parse(parsed.options)
    if parsed.command == "measure" and min(config.hosts, config.ranks_per_host) < 2:
        raise UserError(
            f"hosts={config.hosts} and ranks_per_host={config.ranks_per_host} must be at least 2: links between hosts "
            "and inside one are measured"
        )
    module = {"run": "sparse2d.train", "measure": "sparse2d.testbed.rates"}[parsed.command]
    asked = {"config": asdict(config), "module": module, "arguments": list(overrides)}
    return run_in_sandbox("sparse2d.testbed.inside", [json.dumps(asked)])


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """What is before ``--`` and what is behind it, which argparse would not keep apart."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at : at + 1], arguments[at + 1 :]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"sparse2d.testbed: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("sparse2d.testbed: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
