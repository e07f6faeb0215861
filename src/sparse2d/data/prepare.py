"""From raw rows to a prepared dataset: MLPerf's arrays and a manifest, in one folder that is complete or absent."""

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import sparse2d
from sparse2d.config import NUM_DENSE, NUM_SPARSE, DataConfig, DataSource
from sparse2d.data import synthetic
from sparse2d.data.atomic import replacing
from sparse2d.data.criteo import DENSE_MAPPING, SPARSE_MAPPING, dense_features, read_raw, sparse_ids
from sparse2d.data.manifest import (
    DENSE,
    LABELS,
    SCHEMA,
    SPARSE,
    Columns,
    Manifest,
    OutputFile,
    Split,
    content_digest,
    key_digest,
    read_manifest,
)
from sparse2d.data.npy import npy_appender
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

_MAPPINGS = {"dense": DENSE_MAPPING, "sparse": SPARSE_MAPPING}
_MOST_TABLE_ROWS = np.iinfo(np.int32).max

OnBytes = Callable[[int], object]


def prepare(data: DataConfig, progress: bool = True) -> Path:
    """Return the folder of prepared arrays for these options, made if it is not there yet.

    ``data.path`` may name a folder that was prepared before: it is used as it is, with its own tables and splits.
    Several processes may prepare the same dataset at once; on one file system they take turns, and one of the equal
    copies stays.

    Raises:
        UserError: for a bad option, raw file or output folder, before anything stands under the folder's name.
    """
    if min(data.train_parts, data.eval_parts) < 1:
        raise UserError(
            f"data.train_parts={data.train_parts} and data.eval_parts={data.eval_parts}, expected each at least 1"
        )
    if data.source is DataSource.raw and data.path is not None and Path(data.path).is_dir():
        return _prepared_before(Path(data.path), data)
    _check(data)
    out_dir = Path(data.out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        console = Console(stderr=True)
        shown = progress and console.is_terminal
        # Equal copies would do no harm, but the ranks of a host should not all do the same work.
        with (
            FileLock(out_dir / ".lock"),
            Progress(console=console, transient=True, disable=not shown) as bar,
        ):
            return _prepare(data, out_dir, bar)
    except OSError as error:
        reason = f"{error.filename or out_dir}: {error.strerror or error}"
        raise UserError(
            f"{reason}; data.out_dir={out_dir} must be writable, with room, and data.path readable"
        ) from error


def _prepared_before(folder: Path, data: DataConfig) -> Path:
    manifest = read_manifest(folder)
    manifest.check_files(folder)
    ignored = {
        "data.table_rows": _are_table_rows(data.table_rows) and data.num_embeddings != manifest.num_embeddings,
        "data.train_parts and data.eval_parts": _num_train(manifest.rows, data) != manifest.splits["train"].stop,
    }
    for options in (names for names, differ in ignored.items() if differ):
        log.warning("data.path=%s was prepared with other values of %s: these have no effect on it", folder, options)
    return folder


def _are_table_rows(rows: object) -> bool:
    if not (isinstance(rows, Sequence) and len(rows) == NUM_SPARSE):
        return False
    return all(type(count) is int and 1 <= count <= _MOST_TABLE_ROWS for count in rows)


def _check(data: DataConfig) -> None:
    if not re.fullmatch(r"\w[\w.-]*", data.name):
        raise UserError(f"data.name={data.name!r} names a folder: letters, digits, '.', '_' and '-' only")
    if not _are_table_rows(data.table_rows):
        raise UserError(f"data.table_rows={data.table_rows}, expected {NUM_SPARSE} integers, 1 to {_MOST_TABLE_ROWS}")
    if not 1 <= data.min_table_rows <= data.max_table_rows <= _MOST_TABLE_ROWS:
        raise UserError(
            f"data.min_table_rows={data.min_table_rows} and data.max_table_rows={data.max_table_rows}, "
            f"expected 1 <= min <= max <= {_MOST_TABLE_ROWS}"
        )
    if data.source is DataSource.synthetic and data.path is not None:
        raise UserError(f"data.path={data.path} has no effect with data.source=synthetic; leave one of them out")
    if data.source is DataSource.raw:
        if data.path is None:
            raise UserError("data.path is not set; give a raw Criteo file or a folder that sparse2d.preprocess wrote")
        if not Path(data.path).is_file():
            fault = "is not a file" if Path(data.path).exists() else "does not exist"
            raise UserError(f"data.path={data.path} {fault}; give a raw Criteo file or a prepared folder")


def _prepare(data: DataConfig, out_dir: Path, bar: Progress) -> Path:
    if data.source is DataSource.synthetic:
        raw, logits_path = _synthetic_files(data, out_dir, bar)
    else:
        raw, logits_path = Path(data.path or ""), None
    size, sha256 = raw.stat().st_size, _sha256(raw)
    options = {
        "schema": SCHEMA,
        "source": sha256,
        "mappings": _MAPPINGS,
        "num_embeddings": data.num_embeddings,
        "parts": [data.train_parts, data.eval_parts],
    }
    folder = out_dir / f"{data.name}-{key_digest(options)[:12]}"
    if folder.is_dir():
        read_manifest(folder).check_files(folder)
        return folder

    task = bar.add_task(f"rows of {raw.name}", total=None)
    with replacing(folder) as temporary:
        temporary.mkdir()
        missing = _write_arrays(raw, temporary, data.num_embeddings, lambda rows: bar.advance(task, rows))
        source = {"file": raw.name, "bytes": size, "sha256": sha256}
        if data.source is DataSource.synthetic:
            source["synthetic"] = {**dataclasses.asdict(data.synthetic), "table_rows": list(data.table_rows)}
        manifest = _describe(raw, temporary, data, missing, source, logits_path)
        manifest.write(temporary)
    log.info("prepared %s: %d rows, digest %s", folder, manifest.rows, manifest.digest[:12])
    return folder


def _synthetic_files(data: DataConfig, out_dir: Path, bar: Progress) -> tuple[Path, Path]:
    """The generated raw file and the teacher's logits, named by the options that decide their rows."""
    config = data.synthetic
    options = {
        "generator": synthetic.GENERATOR_VERSION,
        "table_rows": list(data.table_rows),
        **dataclasses.asdict(config),
    }
    stem = f"synthetic-{key_digest(options)[:12]}"
    raw, logits_path = out_dir / f"{stem}.tsv", out_dir / f"{stem}.teacher.npy"
    if not (raw.is_file() and logits_path.is_file()):
        task = bar.add_task("synthetic rows", total=config.rows)
        synthetic.write_raw(raw, logits_path, config, data.table_rows, lambda done: bar.update(task, completed=done))
    return raw, logits_path


def _write_arrays(
    raw: Path, folder: Path, num_embeddings: Sequence[int], on_bytes: OnBytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Convert chunk by chunk, in memory of one chunk; return the missing values of each dense and sparse column."""
    dense_missing, sparse_missing = np.zeros(NUM_DENSE, np.int64), np.zeros(NUM_SPARSE, np.int64)
    with ExitStack() as stack:
        append_dense = stack.enter_context(npy_appender(folder / DENSE, np.float32, NUM_DENSE))
        append_sparse = stack.enter_context(npy_appender(folder / SPARSE, np.int32, NUM_SPARSE))
        append_labels = stack.enter_context(npy_appender(folder / LABELS, np.int32, 1))
        for rows in read_raw(raw):
            append_dense(dense_features(rows.dense, rows.dense_missing))
            append_sparse(sparse_ids(rows.tokens, rows.tokens_missing, num_embeddings))
            append_labels(rows.labels[:, None])
            dense_missing += rows.dense_missing.sum(axis=0)
            sparse_missing += rows.tokens_missing.sum(axis=0)
            on_bytes(len(rows))
    return dense_missing, sparse_missing


def _describe(
    raw: Path,
    folder: Path,
    data: DataConfig,
    missing: tuple[NDArray[np.int64], NDArray[np.int64]],
    source: dict[str, object],
    logits_path: Path | None,
) -> Manifest:
    """Everything the manifest says, taken from the written arrays."""
    arrays = {name: np.load(folder / name, mmap_mode="r") for name in (DENSE, SPARSE, LABELS)}
    dense, sparse, labels = arrays[DENSE], arrays[SPARSE], arrays[LABELS][:, 0]
    splits = _splits(raw, labels, data)
    files = {name: _output_file(folder / name, array) for name, array in arrays.items()}
    return Manifest(
        schema=SCHEMA,
        name=data.name,
        digest=content_digest(files, splits),
        rows=len(labels),
        num_embeddings=data.num_embeddings,
        splits=splits,
        mappings=_MAPPINGS,
        columns=Columns(
            dense_min=dense.min(axis=0).tolist(),
            dense_max=dense.max(axis=0).tolist(),
            dense_missing=missing[0].tolist(),
            sparse_min=sparse.min(axis=0).tolist(),
            sparse_max=sparse.max(axis=0).tolist(),
            sparse_missing=missing[1].tolist(),
            labels=[int(labels.min()), int(labels.max())],
        ),
        files=files,
        source=source,
        versions={"sparse2d": sparse2d.__version__, "numpy": np.__version__},
        teacher=None if logits_path is None else _teacher(raw, logits_path, labels, splits),
    )


def _splits(raw: Path, labels: NDArray[np.int32], data: DataConfig) -> dict[str, Split]:
    """The first parts of the rows train, in time order; the rest evaluates."""
    rows = len(labels)
    parts = (data.train_parts, data.eval_parts)
    num_train = _num_train(rows, data)
    if not 0 < num_train < rows:
        raise UserError(
            f"{raw}: {rows} rows in parts {parts[0]}:{parts[1]} leave {num_train} to train and {rows - num_train} to "
            "evaluate, expected at least 1 each; give more rows or other data.train_parts and data.eval_parts"
        )
    splits = {}
    for name, start, stop in (("train", 0, num_train), ("eval", num_train, rows)):
        positives = int(labels[start:stop].sum())
        splits[name] = Split(start, stop, positives, positives / (stop - start))
    if splits["train"].base_rate in (0.0, 1.0):
        raise UserError(
            f"{raw}: all {num_train} training rows have label {int(splits['train'].base_rate)}, "
            "so that normalized entropy is undefined; give rows of both labels"
        )
    return splits


def _num_train(rows: int, data: DataConfig) -> int:
    return rows * data.train_parts // (data.train_parts + data.eval_parts)


def _output_file(path: Path, array: NDArray[np.generic]) -> OutputFile:
    return OutputFile(path.stat().st_size, _sha256(path), array.dtype.name, list(array.shape))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _teacher(
    raw: Path, logits_path: Path, labels: NDArray[np.int32], splits: dict[str, Split]
) -> dict[str, dict[str, float | None]]:
    logits = np.load(logits_path, mmap_mode="r")
    if len(logits) != len(labels):
        raise UserError(f"{raw}: {len(labels)} rows, expected {len(logits)}; delete it, and it is generated again")
    return {
        name: synthetic.teacher_figures(logits[split.start : split.stop], labels[split.start : split.stop])
        for name, split in splits.items()
    }
