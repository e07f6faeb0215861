"""Rows/s and peak memory of the ingest, of TorchRec's, of a polars pipeline and of mere reading: one file, one run.

Beside them, the loader and its check of ids, as shares of a training step on the same rows.

Each measurement is a process of its own, which warms up on a few rows first: imports and compilation are not counted,
memory is the process's peak, imports included. Rounds go over all tools in turn: a busy machine is busy for all.

    make bench-ingest                # python experiments/ingest/bench.py --rows 600000 --rounds 3
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from sparse2d.config import DataConfig, DataSource, SyntheticConfig
from sparse2d.data.dataset import check_batch, open_dataset, train_batches
from sparse2d.data.prepare import prepare
from sparse2d.data.synthetic import write_raw
from sparse2d.records import write_atomically

TABLE = Path(__file__).parents[2] / "results" / "tables" / "ingest.csv"
KAGGLE_ROWS = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
KAGGLE_ROWS += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
UNIQUE_ROWS = DAY_ROWS = 200_000
WARM_ROWS = 2000
BATCH = 8192
CHECKED_BATCHES, CHECK_REPEATS = 20, 20


def options(raw: Path, out: Path) -> DataConfig:
    """The shipped Kaggle tables at 40 million rows a table at most, hashed ids, all cores."""
    return DataConfig(
        name="bench",
        source=DataSource.raw,
        path=str(raw),
        out_dir=str(out),
        table_rows=KAGGLE_ROWS,
        min_table_rows=1000,
    )


def ours(raw: Path, out: Path) -> None:
    """All of ``python -m sparse2d.preprocess``: arrays, digests of inputs and outputs, statistics, manifest."""
    prepare(options(raw, out), progress=False)


def torchrec(raw: Path, out: Path) -> None:
    """TorchRec's own converter."""
    from torchrec.datasets.criteo import BinaryCriteoUtils

    BinaryCriteoUtils.tsv_to_npys(str(raw), *(str(out / f"{part}.npy") for part in ("dense", "sparse", "labels")))


def polars(raw: Path, out: Path) -> None:
    """Parse, hex to ids, log, three .npy files: what one would write with polars in a few lines."""
    import polars as pl

    dense, sparse = [f"I{i}" for i in range(13)], [f"C{i}" for i in range(26)]
    schema = {"label": pl.Int32, **dict.fromkeys(dense, pl.Int64), **dict.fromkeys(sparse, pl.String)}
    table = pl.read_csv(raw, separator="\t", has_header=False, schema=schema)
    ids = [
        (pl.col(name).str.to_integer(base=16, dtype=pl.Int64).fill_null(0) % max(rows, 1000)).cast(pl.Int32)
        for name, rows in zip(sparse, KAGGLE_ROWS, strict=True)
    ]
    features = (pl.col(dense).fill_null(0).clip(lower_bound=-2) + 3).log().cast(pl.Float32)
    for name, columns in {"labels": [pl.col("label")], "dense": [features], "sparse": ids}.items():
        np.save(out / f"{name}.npy", table.select(columns).to_numpy(order="c"))


def read(raw: Path, out: Path) -> None:
    """The bytes alone: no parser can be faster on one thread."""
    buffer = bytearray(1 << 20)
    with raw.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def load(raw: Path, out: Path) -> None:
    """One pass of the loader over a prepared folder, on one thread, in batches of 8192 rows."""
    dataset = open_dataset(next(path for path in raw.parent.glob("loaded/bench-*")))
    for _ in train_batches(dataset, BATCH, 0, 1):
        pass


def check_ids(raw: Path, out: Path) -> dict[str, float]:
    """The loader's check of ids and labels alone, on batches that are in memory."""
    dataset = open_dataset(next(path for path in raw.parent.glob("loaded/bench-*")))
    batches = list(train_batches(dataset, BATCH, 0, 1, max_steps=CHECKED_BATCHES))
    labels = [batch.labels.astype(np.int32) for batch in batches]
    start = time.perf_counter()
    for _ in range(CHECK_REPEATS):
        for batch, batch_labels in zip(batches, labels, strict=True):
            check_batch(dataset, batch.sparse, batch_labels, int)
    seconds = time.perf_counter() - start
    return {"rows_per_s": CHECK_REPEATS * len(batches) * BATCH / seconds, "peak_memory_bytes": peak_memory()}


def train_step(raw: Path, out: Path) -> dict[str, float]:
    """A real run of the default model on one rank and one thread, at the loader's batch size; warm-up steps apart."""
    options = {
        "data": "criteo_kaggle",
        "data.path": raw,
        "data.out_dir": out / "data",
        "results_dir": out / "results",
        "parallelism": "full_mp",
        "launch.num_ranks": 1,
        "launch.device": "cpu",
        "global_batch_size": BATCH,
        "eval_batch_size": BATCH,
        "tracking": "none",
    }
    command = [sys.executable, "-m", "sparse2d.train", *(f"{name}={value}" for name, value in options.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    record = json.loads(next((out / "results").rglob("record.json")).read_text(encoding="utf-8"))
    return {"rows_per_s": record["train"]["qps"], "peak_memory_bytes": record["memory"]["peak_rss_bytes"]}


SELF_TIMED: dict[str, Callable[[Path, Path], dict[str, float]]] = {"id_check": check_ids, "train_step": train_step}
TOOLS: dict[str, Callable[[Path, Path], None]] = {
    "sparse2d": ours,
    "torchrec": torchrec,
    "polars": polars,
    "read": read,
    "sparse2d_2_days": ours,
    "sparse2d_20_days": ours,
    "loader": load,
}


def measure(tool: str, raw: Path, rows: int) -> dict[str, float]:
    """Run one tool in a process of its own."""
    command = [sys.executable, __file__, "--measure", tool, "--raw", str(raw), "--rows", str(rows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(tool: str, raw: Path, rows: int) -> dict[str, float]:
    """In that process: warm up, then time."""
    with TemporaryDirectory(dir=raw.parent) as out:
        if tool in SELF_TIMED:
            return SELF_TIMED[tool](raw, Path(out))
        for part in ("warm", "timed"):
            (Path(out) / part).mkdir()
        TOOLS[tool](raw if tool == "loader" else raw.parent / "warm.tsv", Path(out) / "warm")
        start = time.perf_counter()
        TOOLS[tool](raw, Path(out) / "timed")
        seconds = time.perf_counter() - start
    return {"rows_per_s": rows / seconds, "peak_memory_bytes": peak_memory()}


def peak_memory() -> int:
    """The high-water mark of this process's memory, in bytes; getrusage would show the parent's if that is larger."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def generate(folder: Path, rows: int) -> None:
    """The raw file, a short one to warm up on, 2 and 20 days (links to one file), and a prepared folder."""
    day = folder / "day.tsv"
    write_raw(day, folder / "logits.npy", SyntheticConfig(rows=UNIQUE_ROWS), KAGGLE_ROWS)
    with (folder / "rows.tsv").open("wb") as file:
        for _ in range(rows // UNIQUE_ROWS):
            with day.open("rb") as part:
                shutil.copyfileobj(part, file)
    with (folder / "warm.tsv").open("wb") as file, day.open("rb") as part:
        file.writelines(part.readline() for _ in range(WARM_ROWS))
    for days in (2, 20):
        (folder / f"{days}_days").mkdir()
        for number in range(days):
            os.link(day, folder / f"{days}_days" / f"day_{number}")
    prepare(options(folder / "rows.tsv", folder / "loaded"), progress=False)


def main(rows: int, rounds: int, days_rounds: int) -> pd.DataFrame:
    """Measure all tools and return the table."""
    points = []
    with TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        generate(folder, rows)
        for number in range(rounds):
            inputs = {tool: (folder / "rows.tsv", rows) for tool in ("sparse2d", "torchrec", "polars", "read")}
            loaded = rows * 6 // 7 // BATCH * BATCH
            inputs |= {tool: (folder / "rows.tsv", loaded) for tool in ("loader", *SELF_TIMED)}
            if number < days_rounds:
                inputs |= {f"sparse2d_{n}_days": (folder / f"{n}_days", n * DAY_ROWS) for n in (2, 20)}
            for tool, (raw, count) in inputs.items():
                points.append({"tool": tool, "round": number} | measure(tool, raw, count))
                print(points[-1], flush=True)
    table = pd.DataFrame(points)
    base = table[table.tool == "torchrec"].set_index("round").rows_per_s
    table["ratio_to_torchrec"] = table.rows_per_s / table["round"].map(base)
    # What a part of the loader takes of the time of a step, in the same round.
    step = table[table.tool == "train_step"].set_index("round").rows_per_s
    in_step = table.tool.isin(["loader", "id_check"])
    table["pct_of_step"] = (100 * table["round"].map(step) / table.rows_per_s).where(in_step)
    columns = ["rows_per_s", "ratio_to_torchrec", "pct_of_step", "peak_memory_bytes"]
    groups = table.groupby("tool", sort=False)[columns]
    result = groups.mean().join(groups.std().add_suffix("_std")).assign(n=groups.size()).reset_index()
    result.insert(0, "label", "measured")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600_000, help="rows of the one file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--days-rounds", type=int, default=1, help="rounds of the 2 and 20 days")
    parser.add_argument("--measure", choices=[*TOOLS, *SELF_TIMED], help=argparse.SUPPRESS)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments.raw, arguments.rows)))
    else:
        result = main(arguments.rows, arguments.rounds, arguments.days_rounds)
        write_atomically(TABLE, result.to_csv(index=False, float_format="%.6g"))
        print(result.to_string(index=False))
