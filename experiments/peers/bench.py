"""Steps per second and peak memory of this trainer, of plain TorchRec, and of torch's EmbeddingBag in DDP.

The same model, rows and ranks; each tool is a program of its own under torchrun, and they take turns in each round, so
that a busy machine is busy for all. Ratios are within a round.

    make bench-peers
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from common import OUT, WARMUP_STEPS

from sparse2d.config import DataConfig, DataSource
from sparse2d.data.arrays import open_dataset
from sparse2d.data.prepare import prepare
from sparse2d.records import write_atomically

HERE = Path(__file__).parent
DIM, DENSE_ARCH, OVER_ARCH = 16, [64, 16], [64, 32, 1]
TABLE_ROWS = [20_000, 1_000] * 13
TOOLS = ("plain_torchrec", "sparse2d", "sparse2d_phases", "torch_ddp")
# torch's sparse all-reduce over gloo corrupts the heap: in 3 of 7 runs of 500 steps (torch 2.13, 2 cores).
CRASHES_UPSTREAM = "torch_ddp"


def data(out_dir: Path, rows: int) -> Path:
    """Folder of the rows that all tools read."""
    config = DataConfig(name="synthetic", source=DataSource.synthetic, out_dir=str(out_dir), table_rows=TABLE_ROWS)
    config.synthetic.rows = rows
    return prepare(config, progress=False)


def command(tool: str, folder: Path, results: Path, batch: int, steps: int) -> list[str]:
    """What torchrun runs for a tool."""
    if tool.startswith("sparse2d"):
        return [
            str(HERE / "ours.py"),
            *("data=files", f'data.path="{folder}"', f"global_batch_size={batch}", f"max_steps={steps}"),
            *(f"model.embedding_dim={DIM}", f"model.dense_arch={DENSE_ARCH}", f"model.over_arch={OVER_ARCH}"),
            *("parallelism=full_mp", "parallelism.sharding=[table_wise]", "optimizer=rowwise_adagrad"),
            *("launch.device=cpu", f"results_dir={results}", "rerun=true", "data.eval_rows=1024"),
            *(["timing=phases"] if tool.endswith("phases") else []),
        ]
    sizes = {"--table-rows": open_dataset(folder).num_embeddings, "--dense-arch": DENSE_ARCH, "--over-arch": OVER_ARCH}
    numbers = {"--batch": batch, "--steps": steps, "--dim": DIM}
    return [
        *(str(HERE / f"{tool}.py"), "--data", str(folder)),
        *(text for option, values in sizes.items() for text in (option, *map(str, values))),
        *(text for option, value in numbers.items() for text in (option, str(value))),
    ]


def measure(program: list[str], ranks: int) -> dict[str, float] | None:
    """Run one tool on its own ranks; the slowest rank's times and the largest rank's memory; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {OUT: folder, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"{program[0]} failed:\n{done.stderr}", file=sys.stderr)
            return None
        numbers = pd.DataFrame([json.loads(path.read_text()) for path in Path(folder).iterdir()]).max()
        return {str(name): float(value) for name, value in numbers.items()}


def main(ranks: int, batch: int, steps: int, rounds: int, results: Path) -> None:
    """Measure all tools in turn; the table is there, and right, after each round."""
    folder = data(results / "data", rows=(steps * batch * 7) // 6 + batch)
    points: list[dict[str, float | str]] = []
    for number in range(rounds):
        for tool in TOOLS:
            measured = measure(command(tool, folder, results, batch, steps), ranks)
            if measured is None:
                # One tool's crash is not the others'.
                print(f"round {number + 1}: {tool} failed, left out", file=sys.stderr, flush=True)
                continue
            points.append({"round": number, "tool": tool, **measured})
            print(f"round {number + 1}: {tool} {measured['step_ms']:.2f} ms a step", file=sys.stderr, flush=True)
        if not points:
            continue
        table = summary(points).assign(num_ranks=ranks, global_batch_size=batch, embedding_dim=DIM)
        table = table.assign(timed_steps=steps - WARMUP_STEPS)
        write_atomically(results / "tables" / "peers.csv", table.to_csv(index=False, float_format="%.6g"))
    never = set(TOOLS) - {str(point["tool"]) for point in points}
    if CRASHES_UPSTREAM in never:
        print(f"{CRASHES_UPSTREAM} crashed in every round: the table is without it", file=sys.stderr)
        never.remove(CRASHES_UPSTREAM)
    if never:
        sys.exit(f"failed in every round: {', '.join(sorted(never))}")
    print(table.to_string(index=False))


def summary(points: list[dict[str, float | str]]) -> pd.DataFrame:
    """One line for each tool: medians over the rounds, ratios to plain TorchRec within a round."""
    table = pd.DataFrame(points)
    plain = table[table["tool"] == "plain_torchrec"].set_index("round")
    ratios = {
        "ratio_to_plain": "step_ms",
        "cpu_ratio_to_plain": "cpu_ms",
        "memory_ratio_to_plain": "peak_memory_bytes",
    }
    for name, column in ratios.items():
        table[name] = table[column] / table["round"].map(plain[column])
    table["steps_per_s"] = 1e3 / table["step_ms"]
    groups = table.drop(columns="round").groupby("tool", sort=False)
    result = groups.median().join(groups.std().add_suffix("_std")).assign(n=groups.size()).reset_index()
    result.insert(0, "label", "measured")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512, help="rows of all ranks")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results-dir", type=Path, default=HERE.parents[1] / "results")
    given = parser.parse_args()
    main(given.ranks, given.batch, given.steps, given.rounds, given.results_dir)
