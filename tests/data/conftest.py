"""Raw lines and prepared datasets, written as real files."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from sparse2d.config import DataConfig, DataSource, SyntheticConfig
from sparse2d.data.dataset import Dataset, open_dataset
from sparse2d.data.prepare import prepare

# Small tables, some smaller than their vocabulary, some of other sizes than their neighbours.
TABLE_ROWS = [
    10,
    100,
    5000,
    3,
    7,
    1000,
    50,
    4,
    13,
    17,
    19,
    23,
    29,
    31,
    37,
    41,
    43,
    47,
    53,
    59,
    61,
    67,
    71,
    73,
    79,
    2_000_000,
]


def make_line(label: object = 0, values: Mapping[str, object] | None = None) -> str:
    """One raw line: every dense value 1 and every token 0000000a, but for those given by name."""
    names = [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    default = {name: "1" if name[0] == "I" else "0000000a" for name in names}
    return "\t".join(str(field) for field in [label, *(default | dict(values or {})).values()])


@pytest.fixture(scope="session")
def line() -> Callable[..., str]:
    return make_line


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    def write(lines: list[str], name: str = "train.tsv") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{text}\n" for text in lines))
        return path

    return write


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Options over ``tmp_path``: raw when a path is given, else synthetic."""

    def make(path: Path | None = None, **options: object) -> DataConfig:
        defaults = {
            "name": "tiny",
            "source": DataSource.synthetic if path is None else DataSource.raw,
            "path": None if path is None else str(path),
            "out_dir": str(tmp_path / "out"),
            "table_rows": TABLE_ROWS,
            "synthetic": SyntheticConfig(rows=700, vocabulary_scale=0.1),
        }
        return DataConfig(**(defaults | options))

    return make


@pytest.fixture
def tagged(config: Callable[..., DataConfig], write_lines: Callable[..., Path]) -> Callable[..., Dataset]:
    """A dataset whose row r has the token r in C26 (and a label of r modulo 2), so that each batch tells its rows."""

    def make(train: int, evaluate: int) -> Dataset:
        raw = write_lines([make_line(row % 2, {"C26": f"{row:x}", "I1": row}) for row in range(train + evaluate)])
        return open_dataset(prepare(config(raw, train_parts=train, eval_parts=evaluate), progress=False))

    return make


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., list[int]]:
    """The tags of a batch's real rows."""
    return lambda batch: np.asarray(batch.sparse[: batch.num_rows, 25]).tolist()
