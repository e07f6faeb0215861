"""Kill ranks of a run at random moments, half of them while it writes a checkpoint.

By hand, with as many kills as you like: ``python tests/checkpoint_kills.py 20 FOLDER``
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from programs import PATIENCE_S
from torch import Tensor

from sparse2d.checkpoint.folder import candidates_at
from sparse2d.checkpoint.rectangles import Rectangle, RectangleLoadPlanner

RANKS = 4
# Enough for the next kill to come, wherever in a save or between saves it waits for its moment.
STEPS_PER_KILL = 40


def command(results: Path, data: Path, steps: int, *more: str) -> list[str]:
    """A run of four ranks, 2 x 2, whose checkpoints are large enough to be caught being written."""
    options = [
        f"results_dir={results}",
        f"data.out_dir={data}",
        "data.synthetic.rows=14000",
        "data.max_table_rows=8000",
        "data.min_table_rows=8000",
        "parallelism=sparse_2d",
        "parallelism.num_groups=2",
        "sync.interval=3",
        f"launch.num_ranks={RANKS}",
        "global_batch_size=60",
        "log_every=7",
        f"max_steps={steps}",
        "tracking=none",
        "checkpoint.interval=8",
        # Batches are drawn ahead of the step that is saved, in an order of their own, with evaluations between.
        "pipeline=sparse_dist",
        "data.shuffle_seed=7",
        "eval_every=10",
    ]
    return [sys.executable, "-m", "sparse2d.train", *options, *more]


def rank_processes(launcher: int) -> list[psutil.Process]:
    """Processes that the launcher's fork server has forked."""
    ranks = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            ranks += child.children()
    return ranks


def kill_ranks(process: subprocess.Popen, run_dir: Path, kills: int, seed: int) -> list[str]:
    """Send SIGKILL to one rank after the other, each after the run has come a little further; says when."""
    rng = random.Random(seed)
    done = []
    for number in range(kills):
        while_saving = number % 2 == 0
        before = len(points(run_dir))
        _wait(process, lambda before=before: len(points(run_dir)) > before or process.poll() is not None)
        time.sleep(rng.uniform(0, 0.3))
        _wait(process, lambda wanted=while_saving: any(run_dir.glob("checkpoints/*.partial")) == wanted)
        time.sleep(rng.uniform(0, 0.05) if while_saving else 0)
        if process.poll() is not None:
            break
        ranks = rank_processes(process.pid)
        assert len(ranks) == RANKS
        victim = rng.choice(ranks)
        partial = any(run_dir.glob("checkpoints/*.partial"))
        os.kill(victim.pid, signal.SIGKILL)
        done.append(f"after {points(run_dir)[-1:]}, {'in a save' if partial else 'between saves'}")
        victim.wait(10)
    return done


def points(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait(process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint at a path."""
    (folder, *_) = candidates_at(path)
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    state = {name: [Rectangle.whole(tensor)] for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=reader, planner=RectangleLoadPlanner(), no_dist=True)
    return tensors


def only_run(results: Path) -> Path:
    (run_dir,) = (path for path in results.glob("runs/*/*") if path.is_dir())
    return run_dir


def killed_and_undisturbed(folder: Path, kills: int, seed: int) -> tuple[Path, Path, list[str]]:
    """Run folders of the same run, undisturbed and with kills, and when each kill came."""
    data = folder / "data"
    steps = STEPS_PER_KILL * kills
    subprocess.run(command(folder / "undisturbed", data, steps), check=True, timeout=600)
    run_dir = folder / "killed" / only_run(folder / "undisturbed").relative_to(folder / "undisturbed")
    with subprocess.Popen(command(folder / "killed", data, steps, f"launch.max_restarts={kills}")) as process:
        try:
            done = kill_ranks(process, run_dir, kills, seed)
            code = process.wait(600)
        finally:
            process.kill()
    assert code == 0, code
    return only_run(folder / "undisturbed"), run_dir, done


def differences(undisturbed: Path, killed: Path) -> list[str]:
    """What is not the same bit for bit: tensors of the last checkpoint, points without their speed, metrics."""
    one, other = read_checkpoint(undisturbed), read_checkpoint(killed)
    assert one.keys() == other.keys()
    found = [name for name in one if not torch.equal(one[name], other[name])]
    # Python's own generator: libraries draw from it on threads, so often as time has it. Nothing here does.
    found = [name for name in found if not name.endswith("/rng/1")]
    without_speed = [
        [
            {key: value for key, value in point.items() if key != "qps" and not key.startswith("rank0/")}
            for point in points(path)
        ]
        for path in (undisturbed, killed)
    ]
    if without_speed[0] != without_speed[1]:
        found.append("metrics.jsonl")
    records = [json.loads((path / "record.json").read_text()) for path in (undisturbed, killed)]
    if records[0]["eval"] != records[1]["eval"]:
        found.append("record.json")
    return found


if __name__ == "__main__":
    started = time.monotonic()
    first, second, moments = killed_and_undisturbed(Path(sys.argv[2]), int(sys.argv[1]), seed=0)
    print(*moments, sep="\n")
    print(f"{len(moments)} kills, {sum('in a save' in moment for moment in moments)} in a save")
    print(f"differences: {differences(first, second) or 'none'}; {time.monotonic() - started:.0f} s")
    print((second / "run.log").read_text())
