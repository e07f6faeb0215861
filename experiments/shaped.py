"""Runs an experiment on hosts in miniature, three times, and goes on where it was stopped.

Each session is one testbed whose ranks run all of the experiment's jobs that are not finished yet: ranks start once.

    make shaped EXPERIMENT=qps_scaling
    python experiments/shaped.py qps_scaling --show      # only print the commands
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator

INTER_HOST_MBIT = 200
ROW_WISE, TABLE_WISE = "parallelism.sharding=[row_wise]", "parallelism.sharding=[table_wise]"
# Two ranks cannot make four groups.
TWO_RANKS = [
    "parallelism=full_mp",
    "parallelism=sparse_2d parallelism.num_groups=1",
    "parallelism=sparse_2d parallelism.num_groups=2 parallelism.replicas=inter_host "
    "sync.rows=touched sync.interval=1,8",
]
# (hosts, ranks per host, overrides) of the sessions of each experiment.
SESSIONS: dict[str, list[tuple[int, int, list[str]]]] = {
    "qps_scaling": [
        (4, 2, [ROW_WISE]),
        (4, 2, [TABLE_WISE]),
        (2, 2, []),
        (1, 2, [f"hydra.sweeper.arms={json.dumps(TWO_RANKS)}"]),
    ],
    "placement": [(2, 4, [ROW_WISE]), (2, 4, [TABLE_WISE])],
    "sync_interval_qps": [(4, 2, [])],
    "group_size": [(4, 2, [])],
}


def commands(experiment: str, repetitions: int, overrides: list[str]) -> Iterator[list[str]]:
    """The command of each session, one repetition after the other; a repetition is a seed."""
    for repetition in range(repetitions):
        for hosts, ranks, session in SESSIONS[experiment]:
            yield [
                *(sys.executable, "-m", "sparse2d.testbed", "run", f"hosts={hosts}", f"ranks_per_host={ranks}"),
                *(f"inter_host_mbit={INTER_HOST_MBIT}", "--", "-m", f"experiment={experiment}"),
                *(f"seed={repetition}", *session, *overrides),
            ]


def main() -> int:
    """Run all sessions; returns how many had a failing job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment", choices=SESSIONS)
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
