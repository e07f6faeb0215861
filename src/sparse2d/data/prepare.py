"""From raw rows to a prepared dataset: MLPerf's arrays and a manifest, in one folder that is complete or absent.

Work goes on in a hidden folder named by the options. There a finished day keeps its arrays and its record, so that a
command that was killed, or that met a bad line, does not convert it again. Once all days are finished, the folder gets
its manifest and its name, which stands for the options and the digests of the inputs.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from sparse2d.config import NUM_SPARSE, DataConfig, DataSource, IdMapping, OnBadLine
from sparse2d.data.manifest import DENSE, MANIFEST, read_manifest
from sparse2d.data.raw import find_days
from sparse2d.data.splits import check_split_options
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

_INT32 = np.iinfo(np.int32)
PATIENCE_S = 2


def prepare(data: DataConfig, progress: bool = True) -> Path:
    """Return the folder of prepared arrays for these options, made if it is not there yet.

    ``data.path`` may name a folder that was prepared before: it is used as it is, with its own tables and splits. A
    folder of MLPerf's or TorchRec's arrays is read once, to describe it. Several processes may prepare the same dataset
    at once; on one file system they take turns.

    Raises:
        UserError: for a bad option, raw file or output folder, before anything stands under the folder's name.
    """
    _check_paths(data)
    check_split_options(data)
    folder = Path(data.path) if data.source is DataSource.raw and data.path is not None else None
    if folder is not None and (folder / MANIFEST).is_file():
        return _prepared_before(folder, data)
    _check(data)
    with working_in(Path(data.out_dir), tells=progress) as out_dir:
        # Numba takes half a second to import: not for a caller whose dataset is there, or who only asks for help.
        if folder is not None and is_arrays(folder):
            from sparse2d.data.adopt import adopt

            return adopt(folder, data, out_dir)
        from sparse2d.data.build import build

        return build(data, raw_inputs(data), out_dir, progress)


def known_table_rows(data: DataConfig) -> list[int] | None:
    """Rows of the 26 tables, where they can be told without reading or preparing any data; None otherwise.

    Raises:
        UserError: for numbers that no table can have.
    """
    _check_paths(data)
    path = None if data.path is None else Path(data.path)
    if path is not None and (path / MANIFEST).is_file():
        return read_manifest(path).num_embeddings
    if data.ids is IdMapping.contiguous:
        return None
    _check_table_rows(data)
    return data.num_embeddings


def prepared_folder(data: DataConfig) -> Path:
    """The folder that was prepared for these options; nothing is made.

    Raises:
        UserError: if there is none, or an option is bad.
    """
    _check_paths(data)
    check_split_options(data)
    if data.path is not None and (Path(data.path) / MANIFEST).is_file():
        return Path(data.path)
    _check(data)
    if not Path(data.out_dir).is_dir():
        raise UserError(f"data.out_dir={data.out_dir} does not exist: nothing was prepared there")
    from sparse2d.data.build import find

    with working_in(Path(data.out_dir)) as out_dir:
        found = find(data, raw_inputs(data), out_dir)
    if found is None:
        raise UserError(f"data.out_dir={out_dir} holds nothing that was prepared with these options")
    return found


def is_arrays(folder: Path) -> bool:
    """Whether a folder holds arrays of another program: ``day_D_dense.npy`` and so on, without a manifest."""
    return folder.is_dir() and any(folder.glob(DENSE.replace("0", "*")))


@contextmanager
def working_in(out_dir: Path, tells: bool = True) -> Iterator[Path]:
    """Make ``out_dir`` if need be and keep other processes out of it; what the system refuses is the user's error.

    Args:
        out_dir: where datasets are kept.
        tells: whether to say that another process is waited for.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # Equal copies would do no harm, but the ranks of a host should not all do the same work.
        with _acquired(FileLock(out_dir / ".lock"), out_dir, tells):
            yield out_dir
    except OSError as error:
        reason = f"{error.filename or out_dir}: {error.strerror or error}"
        raise UserError(
            f"{reason}; data.out_dir={out_dir} (results_dir/data unless set) must be writable, with room, "
            "and data.path readable"
        ) from error


def _acquired(lock: BaseFileLock, out_dir: Path, tells: bool) -> AbstractContextManager[object]:
    """The lock, taken; whoever has to wait long for it is told so, since that may take hours."""
    try:
        # The ranks of one torchrun take turns, and looking up a dataset that is there takes less.
        return lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        if tells:
            log.info("another process, or rank, is at work in data.out_dir=%s: waiting for it to end", out_dir)
        return lock.acquire()


def raw_inputs(data: DataConfig) -> dict[int, Path]:
    """The raw file of each day; none for synthetic rows."""
    if data.source is DataSource.synthetic:
        return {}
    path = Path(data.path or data.raw_dir or "")
    return find_days(path, data.days) if path.is_dir() else {0: path}


def _prepared_before(folder: Path, data: DataConfig) -> Path:
    manifest = read_manifest(folder)
    manifest.check_files(folder)
    num_train = manifest.rows * data.train_parts // (data.train_parts + data.eval_parts)
    ignored = {
        "data.table_rows": _are_table_rows(data.table_rows) and data.num_embeddings != manifest.num_embeddings,
        "data.train_parts and data.eval_parts": num_train != manifest.splits["train"].stop,
    }
    for options in (names for names, differ in ignored.items() if differ):
        log.warning("data.path=%s was prepared with other values of %s: these have no effect on it", folder, options)
    return folder


def _are_table_rows(rows: object) -> bool:
    if not (isinstance(rows, Sequence) and len(rows) == NUM_SPARSE):
        return False
    return all(type(count) is int and 1 <= count <= _INT32.max for count in rows)


def _check_paths(data: DataConfig) -> None:
    """Refuse what an unset variable of a shell leaves of a path: it would stand for the current folder."""
    for name in ("path", "raw_dir", "out_dir", "vocabulary"):
        if getattr(data, name) == "":
            raise UserError(f"data.{name} is empty; give a path, or leave the option out")


def _check_table_rows(data: DataConfig) -> None:
    if not _are_table_rows(data.table_rows):
        raise UserError(f"data.table_rows={data.table_rows}, expected {NUM_SPARSE} integers, 1 to {_INT32.max}")
    if not 1 <= data.min_table_rows <= data.max_table_rows <= _INT32.max:
        raise UserError(
            f"data.min_table_rows={data.min_table_rows} and data.max_table_rows={data.max_table_rows}, "
            f"expected 1 <= min <= max <= {_INT32.max}"
        )


def _check(data: DataConfig) -> None:
    if not re.fullmatch(r"\w[\w.-]*", data.name):
        raise UserError(f"data.name={data.name!r} names a folder: letters, digits, '.', '_' and '-' only")
    _check_table_rows(data)
    at_least = {"workers": (data.workers, 1), "max_rejects": (data.max_rejects, 0), "min_count": (data.min_count, 1)}
    for name, (value, low) in at_least.items():
        if value is not None and value < low:
            raise UserError(f"data.{name}={value}, expected at least {low}")
    if not _INT32.min <= data.dense_min <= 0:
        raise UserError(f"data.dense_min={data.dense_min}, expected {_INT32.min} to 0")
    if data.vocabulary is not None and data.ids is not IdMapping.contiguous:
        raise UserError(f"data.vocabulary={data.vocabulary} needs data.ids=contiguous")
    _check_source(data)
    if data.ids is IdMapping.as_found and not (data.path is not None and is_arrays(Path(data.path))):
        raise UserError(
            f"data.ids=as_found needs arrays, and data.path={data.path} holds no {DENSE.replace('0', 'D')} and no "
            f"{MANIFEST}; raw tokens need data.ids=hash or contiguous"
        )


def _check_source(data: DataConfig) -> None:
    if data.source is DataSource.synthetic:
        for name in ("path", "raw_dir", "days"):
            if (value := getattr(data, name)) is not None:
                raise UserError(f"data.{name}={value} has no effect with data.source=synthetic; leave one of them out")
        if data.on_bad_line is OnBadLine.reject:
            raise UserError("data.on_bad_line=reject needs raw files: synthetic rows have no bad lines")
        return
    if data.path is not None and data.raw_dir is not None:
        raise UserError(f"data.path={data.path} and data.raw_dir={data.raw_dir}: give one of them")
    if data.raw_dir is not None:
        if not Path(data.raw_dir).is_dir():
            raise UserError(f"data.raw_dir={data.raw_dir} is not a folder; give the folder of day_0, day_1, ...")
    elif data.path is None:
        raise UserError("data.path is not set; give a raw Criteo file or a folder that sparse2d.preprocess wrote")
    elif not (Path(data.path).is_file() or Path(data.path).is_dir()):
        fault = "is not a file" if Path(data.path).exists() else "does not exist"
        raise UserError(f"data.path={data.path} {fault}; give a raw Criteo file or a prepared folder")
    if data.days is not None:
        if data.path is not None and not Path(data.path).is_dir():
            raise UserError(f"data.days={data.days} has no effect with the single file data.path={data.path}")
        if not data.days or len(set(data.days)) < len(data.days) or min(data.days) < 0:
            raise UserError(f"data.days={data.days}, expected different days, each at least 0")


def default_workers() -> int:
    """A worker for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
