"""Runs an experiment on hosts in miniature, three times, and goes on where it was stopped.

On one testbed after the other, whose ranks start once and run all of the experiment's jobs that are not finished yet.

    make shaped EXPERIMENT=qps_scaling
    python experiments/shaped.py qps_scaling --show      # only print the commands
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

CONF = Path(__file__).parents[1] / "conf"

INTER_HOST_MBIT = 200


class Testbed(NamedTuple):
    """Hosts in miniature, and what runs on them."""

    hosts: int
    ranks_per_host: int
    overrides: list[str]
    # Repetitions that take their turns on one testbed, where they are short; 1 else, one after the other.
    together: int


def arms_of_two_ranks() -> str:
    """Those of ``qps_scaling`` that two ranks can run: they cannot make four groups."""
    config = yaml.safe_load((CONF / "experiment" / "qps_scaling.yaml").read_text())
    arms = [arm.replace("num_groups=2,4", "num_groups=2") for arm in config["hydra"]["sweeper"]["arms"]]
    return f"hydra.sweeper.arms={json.dumps(arms)}"


TESTBEDS = {
    "qps_scaling": [
        Testbed(4, 2, [], together=1),
        Testbed(2, 2, [], together=3),
        Testbed(1, 2, [arms_of_two_ranks()], together=3),
    ],
    "placement": [Testbed(2, 4, [], together=1)],
    "sync_interval_qps": [Testbed(4, 2, [], together=3)],
    "group_size": [Testbed(4, 2, [], together=3)],
}


def commands(experiment: str, repetitions: int, overrides: list[str]) -> Iterator[list[str]]:
    """The command of each testbed; a repetition is a seed."""
    for first in range(repetitions):
        for testbed in TESTBEDS[experiment]:
            if first % testbed.together:
                continue
            seeds = ",".join(map(str, range(first, min(first + testbed.together, repetitions))))
            yield [
                *(sys.executable, "-m", "sparse2d.testbed", "run"),
                *(f"hosts={testbed.hosts}", f"ranks_per_host={testbed.ranks_per_host}"),
                *(f"inter_host_mbit={INTER_HOST_MBIT}", "--", "-m", f"experiment={experiment}"),
                *(f"seed={seeds}", *testbed.overrides, *overrides),
            ]


def main() -> int:
    """Run all; returns on how many testbeds a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment", choices=TESTBEDS)
    parser.add_argument("overrides", nargs="*", help="further options of sparse2d.train, say results_dir=...")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the commands instead of running them")
    arguments = parser.parse_intermixed_args()
    failed = 0
    for command in commands(arguments.experiment, arguments.repetitions, arguments.overrides):
        if arguments.show:
            print(shlex.join(command))
        elif (code := subprocess.run(command).returncode) == -2:  # Ctrl-C
            return code
        else:
            failed += code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
