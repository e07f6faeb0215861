"""``python -m sparse2d.reproduce``: run the claims of ``experiments/claims.yaml``, one after the other."""

import hashlib
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from sparse2d.cli import run_entry_point
from sparse2d.config import ReproduceConfig
from sparse2d.errors import UserError
from sparse2d.records import write_atomically
from sparse2d.report.claims import Claim, Scale, claims_file, read_claims
from sparse2d.testbed.sandbox import command_prefix

log = logging.getLogger("sparse2d.reproduce")

# Seconds that a command gets to end after Ctrl-C.
GRACE_S = 30
# Tables of all runs first: figures are drawn from them, and the report shows both.
AFTERWARDS = ("python -m sparse2d.report", "python paper_figures", "python -m sparse2d.report")


def main(config: ReproduceConfig) -> None:
    """Run each claim's commands, unless they ran before; then the tables, the figures and the report.

    Raises:
        UserError: for an unknown claim, or rows that are not there; at the end, if a command failed.
    """
    if config.data_path is not None and not Path(config.data_path).exists():
        raise UserError(f"data_path={config.data_path} does not exist; give raw Criteo rows, or leave it out")
    checkout = claims_file().parents[1]
    claims = _chosen(read_claims(claims_file()), config)
    started, failed = time.monotonic(), []
    for number, (claim, scale) in enumerate(claims, start=1):
        commands = [command.replace("{data}", _data_options(config.data_path)) for command in scale.commands]
        place = f"[{number}/{len(claims)}] {claim.name}"
        stamp = checkout / "results" / "reproduced" / f"{claim.name}-{_digest(commands)}.json"
        if stamp.is_file() and not config.rerun:
            log.info("%s: finished before (rerun=true runs it again)", place)
            continue
        if scale.testbed and (reason := _no_testbed()) is not None:
            log.warning("%s: left out, %s", place, reason)
            continue
        has_rows = any("{data}" in command for command in scale.commands)
        note = "" if config.data_path is None or has_rows else "; data_path has no part in it"
        log.info("%s: %s (about %g min)%s", place, claim.title, scale.minutes, note)
        begun = time.monotonic()
        if not all(_succeeds(command, checkout) for command in commands):
            log.error("%s: failed after %.0f s", place, time.monotonic() - begun)
            failed.append(claim.name)
            continue
        write_atomically(stamp, json.dumps({"commands": commands, "wall_s": round(time.monotonic() - begun)}) + "\n")
        log.info("%s: done in %.0f s", place, time.monotonic() - begun)
    for command in AFTERWARDS:
        if not _succeeds(command, checkout):
            failed.append(command)
    log.info("%d claims in %.0f s -> results/REPORT.md, results/report.html", len(claims), time.monotonic() - started)
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; the same command goes on with them")


def _chosen(claims: Sequence[Claim], config: ReproduceConfig) -> list[tuple[Claim, Scale]]:
    """The claims to run with how; one that has no commands at this scale is left out, and said to be."""
    if unknown := set(config.claims) - {claim.name for claim in claims}:
        raise UserError(
            f"unknown claim {sorted(unknown)[0]!r}; choose from: {', '.join(claim.name for claim in claims)}"
        )
    chosen = []
    for claim in claims:
        if config.claims and claim.name not in config.claims:
            continue
        scale: Scale | None = getattr(claim, config.scale.name)
        if scale is None:
            log.info("%s: not at scale=%s", claim.name, config.scale.name)
        else:
            chosen.append((claim, scale))
    return chosen


@cache
def _no_testbed() -> str | None:
    """Why this machine cannot have hosts in miniature, if it cannot."""
    try:
        command_prefix()
    except UserError as error:
        return str(error)
    return None


def _data_options(path: str | None) -> str:
    if path is None:
        return "data=synthetic"
    return shlex.join(["data=criteo_kaggle", f'data.path="{Path(path).resolve()}"'])


def _digest(commands: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(commands).encode()).hexdigest()[:8]


def _succeeds(command: str, folder: Path) -> bool:
    """Run one command of a claim, ``python`` being this one, from the checkout's top.

    What it prints are tables, which the report has; what it tells on standard error is shown as it comes.
    """
    log.info("  %s", command)
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        return process.wait() == 0
    except BaseException as end:
        _end(process, at_once=not isinstance(end, KeyboardInterrupt))
        raise


def _end(process: subprocess.Popen[bytes], at_once: bool) -> None:
    """Have a command end in order, so that its runs get their records; ``subprocess.run`` would kill it."""
    if not at_once:
        # Ctrl-C has reached it, too, unless it was sent to this process alone.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    run_entry_point("reproduce", ReproduceConfig, main)
