"""``manifest.json``: what a prepared dataset holds, where it came from, and whether its files are still whole."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse2d.data.atomic import replacing
from sparse2d.errors import UserError

SCHEMA = 2
MANIFEST = "manifest.json"
DENSE, SPARSE, LABELS = "day_0_dense.npy", "day_0_sparse.npy", "day_0_labels.npy"
PARTS = ("dense", "sparse", "labels")


def array_name(day: int, part: str) -> str:
    """The file of one day's ``dense``, ``sparse`` or ``labels``."""
    return f"day_{day}_{part}.npy"


def multi_hot_name(day: int) -> str:
    """MLPerf's file of one day's multi-hot ids: 26 arrays "0" to "25"."""
    return f"day_{day}_sparse_multi_hot.npz"


@dataclass(frozen=True)
class OutputFile:
    """One array file: its size in bytes, digest and contents."""

    bytes: int
    sha256: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Split:
    """Rows ``[start, stop)`` of one use, and their labels."""

    start: int
    stop: int
    positives: int
    base_rate: float


@dataclass(frozen=True)
class Columns:
    """Per column, in the order I1..I13 or C1..C26: what the arrays hold.

    ``sparse_distinct`` counts the ids that occur, ``sparse_oov`` the tokens that the vocabulary does not hold. Missing
    and out-of-vocabulary values are null where arrays were made by another program.
    """

    dense_min: list[float]
    dense_max: list[float]
    dense_missing: list[int] | None
    sparse_min: list[int]
    sparse_max: list[int]
    sparse_missing: list[int] | None
    sparse_distinct: list[int]
    sparse_oov: list[int] | None
    labels: list[int]


@dataclass(frozen=True)
class Day:
    """One day's place in the dataset: ``rows`` rows from ``first_row`` on."""

    day: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Manifest:
    """A prepared dataset; ``digest`` stands for its arrays and splits, whatever its name and source.

    ``arrays_at`` is the folder of the arrays where another program made them, null where they stand beside the
    manifest; ``modulo`` says that their ids are to be taken modulo ``num_embeddings``. ``teacher`` (synthetic data
    only) is the planted teacher's log loss and NE on each split: the best reachable.
    """

    schema: int
    name: str
    digest: str
    rows: int
    num_embeddings: list[int]
    splits: dict[str, Split]
    mappings: dict[str, str]
    columns: Columns
    days: list[Day]
    files: dict[str, OutputFile]
    source: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    teacher: dict[str, dict[str, float | None]] | None = None
    arrays_at: str | None = None
    modulo: bool = False

    def arrays_in(self, folder: Path) -> Path:
        """The folder of the arrays of a manifest in ``folder``."""
        return folder if self.arrays_at is None else Path(self.arrays_at)

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``; last of all files, it says that the folder is complete."""
        with replacing(folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    def check_files(self, folder: Path) -> None:
        """Compare the files' sizes with those recorded.

        Raises:
            UserError: naming the first file that is missing or of another size.
        """
        for name, expected in self.files.items():
            path = self.arrays_in(folder) / name
            size = path.stat().st_size if path.is_file() else None
            if size != expected.bytes:
                found = "missing" if size is None else f"{size} bytes"
                raise UserError(
                    f"{path}: {found}, expected {expected.bytes} bytes; delete {folder} and prepare it again"
                )


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder/manifest.json``.

    Raises:
        UserError: if there is none, or it is not one that this version can read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}: not a prepared dataset; make one with sparse2d.preprocess")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["schema"] != SCHEMA:
            raise UserError(
                f"{path}: schema {fields['schema']}, expected {SCHEMA}; delete {folder} and prepare it again"
            )
        fields["splits"] = {name: Split(**split) for name, split in fields["splits"].items()}
        fields["files"] = {name: OutputFile(**file) for name, file in fields["files"].items()}
        fields["columns"] = Columns(**fields["columns"])
        fields["days"] = [Day(**day) for day in fields["days"]]
        manifest = Manifest(**fields)
        for day in manifest.days:
            for part in ("dense", "labels", *(() if multi_hot_name(day.day) in manifest.files else ("sparse",))):
                manifest.files[array_name(day.day, part)]
        for name in ("train", "eval"):
            manifest.splits[name]
        return manifest
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete {folder} and prepare it again"
        ) from error


def content_digest(files: dict[str, OutputFile], splits: dict[str, Split]) -> str:
    """One sha256 over the arrays' digests and the splits' row ranges."""
    ranges = {name: [split.start, split.stop] for name, split in splits.items()}
    return key_digest({"files": {name: file.sha256 for name, file in files.items()}, "splits": ranges})


def key_digest(key: dict[str, Any]) -> str:
    """The sha256 of a JSON-able value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
