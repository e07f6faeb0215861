"""Build a dataset from raw files or the planted teacher: the days side by side, then what all of them add up to."""

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import sparse2d
from sparse2d.config import DataConfig, DataSource, IdMapping, OnBadLine, SplitKind
from sparse2d.data import capacity, synthetic
from sparse2d.data.atomic import replacing, sync
from sparse2d.data.digests import KnownDigests
from sparse2d.data.fit import fit_vocabulary
from sparse2d.data.ids import HashIds, IdMap
from sparse2d.data.ingest import DayRecord, ingest_day, read_record, record_name, seen_name
from sparse2d.data.job import IngestJob
from sparse2d.data.manifest import (
    MANIFEST,
    SCHEMA,
    Columns,
    Day,
    Manifest,
    content_digest,
    key_digest,
    read_manifest,
)
from sparse2d.data.mappings import dense_mapping_name
from sparse2d.data.prepare import default_workers
from sparse2d.data.progress import OnRows, Progress
from sparse2d.data.seen import SeenIds
from sparse2d.data.sources import DaySource, Rejects, day_sources, synthetic_days
from sparse2d.data.splits import check_num_days, labelled_splits, split_options, split_ranges
from sparse2d.data.vocabulary import VOCABULARY, Vocabulary, VocabularyIds
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

REJECTS = "rejects.tsv"
_DIGESTS = ".digests.json"


def build(data: DataConfig, inputs: Mapping[int, Path], out_dir: Path, progress: bool) -> Path:
    """Return the folder of the dataset of these options and inputs (none: synthetic), made if it is not there yet.

    Raises:
        UserError: for a bad raw file or too little room; finished days are kept for the next call.
    """
    if (found := find(data, inputs, out_dir)) is not None:
        read_manifest(found).check_files(found)
        return found
    known = KnownDigests(out_dir / _DIGESTS)
    options = _all_options(data, inputs)
    workers = data.workers or default_workers()
    # Other splits do not change the days.
    partial = out_dir / f".{data.name}-{key_digest(_options(data, list(inputs)))[:12]}.partial"
    partial.mkdir(exist_ok=True)
    try:
        _remove_leftovers(partial)
        with ThreadPoolExecutor(workers) as pool, Progress(progress) as bar:
            job = IngestJob(data, inputs, partial, known, pool, workers, bar)
            _check_before_start(job)
            ids = _id_map(job)
            records = _ingest(job, ids)
        manifest = _describe(data, options, inputs, partial, records, ids)
    except BaseException:
        if not any(partial.glob("day_*.json")) and not any(partial.glob("vocabulary*")):
            shutil.rmtree(partial)
        raise
    sources = [record.source["sha256"] for record in records] if inputs else []
    folder = _folder(data, options, sources, out_dir)
    _name(partial, folder, records, manifest)
    for split, rows in manifest.splits.items():
        log.info("%s: rows %d to %d, base rate %.4f", split, rows.start, rows.stop, rows.base_rate)
    log.info("prepared %s: %d rows, digest %s", folder, manifest.rows, manifest.digest[:12])
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _options(data: DataConfig, days: list[int]) -> dict[str, Any]:
    """Everything that decides the arrays, but for the inputs' content."""
    options: dict[str, Any] = {
        "schema": SCHEMA,
        "days": days,
        "num_embeddings": data.num_embeddings,
        "dense": dense_mapping_name(data),
        "ids": data.ids.name,
        "on_bad_line": data.on_bad_line.name,
    }
    if data.ids is IdMapping.contiguous:
        options |= {
            "min_count": data.min_count,
            "vocabulary": data.vocabulary and Vocabulary.load(Path(data.vocabulary)).digest,
        }
    if data.source is DataSource.synthetic:
        options |= {
            "generator": synthetic.GENERATOR_VERSION,
            "table_rows": list(data.table_rows),
            "synthetic": dataclasses.asdict(data.synthetic),
            # The teacher's figures are summed up by split.
            "split": split_options(data),
        }
    return options


def _all_options(data: DataConfig, inputs: Mapping[int, Path]) -> dict[str, Any]:
    """Those, and what decides the rest of the dataset or whether there may be one."""
    rejects = {"max_rejects": data.max_rejects} if data.on_bad_line is OnBadLine.reject else {}
    return _options(data, list(inputs)) | {"split": split_options(data)} | rejects


def _folder(data: DataConfig, options: Mapping[str, Any], sources: list[str], out_dir: Path) -> Path:
    return out_dir / f"{data.name}-{key_digest({**options, 'sources': sources})[:12]}"


def find(data: DataConfig, inputs: Mapping[int, Path], out_dir: Path) -> Path | None:
    """The folder of a finished dataset; inputs are read for their digests only where that may find one."""
    if not any(out_dir.glob(f"{data.name}-*/{MANIFEST}")):
        return None
    known = KnownDigests(out_dir / _DIGESTS)
    options = _all_options(data, inputs)
    folder = _folder(data, options, [known.get_or_read(path) for path in inputs.values()], out_dir)
    return folder if folder.is_dir() else None


def _id_map(job: IngestJob) -> IdMap:
    """The mapping from tokens to ids; a vocabulary that was fitted in an earlier call is taken over."""
    data, file = job.data, job.folder / VOCABULARY
    if data.ids is IdMapping.hash:
        return HashIds(data.num_embeddings)
    if data.vocabulary is not None:
        vocabulary = Vocabulary.load(Path(data.vocabulary))
        vocabulary.save(file)
    elif (before := _fitted_before(job, file)) is not None:
        vocabulary = before
    else:
        file.unlink(missing_ok=True)
        with TemporaryDirectory(prefix=".counts.", suffix=".tmp", dir=job.folder) as folder:
            vocabulary = fit_vocabulary(job, Path(folder))
        with replacing(_fit_file(file)) as temporary:
            temporary.write_text(_fit_key(job))
        vocabulary.save(file)
        log.info("fitted a vocabulary of %d tokens", sum(len(tokens) for tokens in vocabulary.tokens))
    return VocabularyIds(vocabulary, data.min_table_rows, data.max_table_rows)


def _fitted_before(job: IngestJob, file: Path) -> Vocabulary | None:
    """The vocabulary of an earlier call, if it was fitted on the same rows and its file is whole."""
    if not file.is_file() or _fitted_on(file) != _fit_key(job):
        return None
    try:
        return Vocabulary.load(file)
    except UserError as damaged:
        log.info("%s", damaged)
        return None


def _fit_file(vocabulary: Path) -> Path:
    return vocabulary.with_suffix(".key")


def _fitted_on(vocabulary: Path) -> str:
    file = _fit_file(vocabulary)
    return file.read_text() if file.is_file() else ""


def _fit_key(job: IngestJob) -> str:
    """What a vocabulary depends on: the splits, and the content of the inputs that hold training rows."""
    training = list(job.inputs.values())[: -1 if job.data.split is SplitKind.last_day else None]
    sources = [job.known.get_or_read(path) for path in training]
    return key_digest({"split": split_options(job.data), "sources": sources})


def _check_before_start(job: IngestJob) -> None:
    """Refuse too few rows or days, as far as they are known, and too little room."""
    data, inputs = job.data, job.inputs
    check_num_days(len(job.days), data, _what(data, inputs))
    estimates = {day: capacity.estimate_rows(path) for day, path in inputs.items()}
    for day, (rows, _) in estimates.items():
        if rows == 0:
            raise UserError(f"{inputs[day]}: 0 rows (the file is empty); give a raw Criteo file")
    if all(exact for _, exact in estimates.values()) and inputs:
        try:
            split_ranges([rows for rows, _ in estimates.values()], data, _what(data, inputs))
        except UserError:
            # Too few lines may be no rows at all.
            for path in inputs.values():
                capacity.refuse_bad_line(path)
            raise
    day_rows = [rows for rows, _ in estimates.values()] or [len(rows) for rows in synthetic_days(data)]
    todo = [rows for day, rows in zip(job.days, day_rows, strict=True) if not _is_finished(job, day)]
    tables = data.num_embeddings
    if data.ids is IdMapping.contiguous:
        tables = [min(size, sum(day_rows)) for size in tables]
    needs = capacity.estimate(sum(todo), len(todo), job.workers, tables)
    if data.ids is IdMapping.contiguous:
        needs = capacity.with_vocabulary(needs, sum(tables), 0 if data.vocabulary else sum(day_rows))
    capacity.check(needs, job.folder)


def _is_finished(job: IngestJob, day: int) -> bool:
    """Whether an earlier call finished this day, of the same input; the folder may be left from another one."""
    record = read_record(job.folder, day)
    return record is not None and _is_of_same_input(job, record)


def _is_of_same_input(job: IngestJob, record: DayRecord) -> bool:
    return not job.inputs or job.known.get_or_read(job.inputs[record.day]) == record.source["sha256"]


def _what(data: DataConfig, inputs: Mapping[int, Path]) -> object:
    """The input's name in errors."""
    return next(iter(inputs.values())) if len(inputs) == 1 else data.raw_dir or data.path or "synthetic"


def _ingest(job: IngestJob, ids: IdMap) -> list[DayRecord]:
    """The records of all days, in order; those of an earlier call are taken over where their input is the same."""
    key = key_digest({**_options(job.data, []), "ids": ids.digest})
    records = {}
    for day in job.days:
        record = read_record(job.folder, day)
        if record is not None and record.key == key and _is_of_same_input(job, record):
            log.info("day_%d is finished already: %d rows", day, record.rows)
            records[day] = record
    rejects = Rejects(job.data, sum(len(record.source.get("rejected", ())) for record in records.values()))
    todo = [source for source in day_sources(job.data, job.inputs, rejects) if source.day not in records]

    def one_day(source: DaySource, on_rows: OnRows) -> DayRecord:
        return ingest_day(job, source, ids, key, on_rows)

    records |= job.over_days("rows", todo, one_day)
    return [records[day] for day in sorted(records)]


def _describe(
    data: DataConfig,
    options: Mapping[str, Any],
    inputs: Mapping[int, Path],
    folder: Path,
    records: list[DayRecord],
    ids: IdMap,
) -> Manifest:
    """Everything the manifest says."""
    what = _what(data, inputs)
    ranges = split_ranges([record.rows for record in records], data, what)
    files = {name: file for record in records for name, file in record.files.items()}
    days, first_row = [], 0
    for record in records:
        days.append(Day(record.day, first_row, record.rows))
        first_row += record.rows
    splits = labelled_splits(ranges, days, folder, what)
    source: dict[str, Any] = {"files": [record.source for record in records]} if inputs else {}
    if not inputs:
        source["synthetic"] = {**dataclasses.asdict(data.synthetic), "table_rows": list(data.table_rows)}
    return Manifest(
        schema=SCHEMA,
        name=data.name,
        digest=content_digest(files, splits),
        rows=first_row,
        num_embeddings=ids.num_embeddings,
        splits=splits,
        mappings={"dense": dense_mapping_name(data), "sparse": ids.name, "vocabulary": ids.digest},
        columns=_columns(folder, records, ids),
        days=days,
        files=files,
        source=source,
        versions={"sparse2d": sparse2d.__version__, "numpy": np.__version__},
        options=dict(options),
        teacher=None if inputs else _teacher(records, list(splits)),
    )


def _columns(folder: Path, records: list[DayRecord], ids: IdMap) -> Columns:
    bits = np.load(folder / seen_name(records[0].day))
    for record in records[1:]:
        bits |= np.load(folder / seen_name(record.day))
    positives, rows = sum(record.positives for record in records), sum(record.rows for record in records)
    return Columns(
        dense_min=np.min([record.dense_min for record in records], axis=0).tolist(),
        dense_max=np.max([record.dense_max for record in records], axis=0).tolist(),
        dense_missing=np.sum([record.dense_missing for record in records], axis=0).tolist(),
        sparse_min=np.min([record.sparse_min for record in records], axis=0).tolist(),
        sparse_max=np.max([record.sparse_max for record in records], axis=0).tolist(),
        sparse_missing=np.sum([record.sparse_missing for record in records], axis=0).tolist(),
        sparse_distinct=SeenIds(ids.num_embeddings, bits).distinct(),
        sparse_oov=np.sum([record.sparse_oov for record in records], axis=0).tolist(),
        labels=[int(positives == rows), int(positives > 0)],
    )


def _teacher(records: list[DayRecord], splits: list[str]) -> dict[str, dict[str, float | None]]:
    sums = {name: np.sum([record.source["teacher"][name] for record in records], axis=0) for name in splits}
    return {
        name: synthetic.TeacherSums(int(rows), int(positives), float(loss)).figures()
        for name, (rows, positives, loss) in sums.items()
    }


def _name(partial: Path, folder: Path, records: list[DayRecord], manifest: Manifest) -> None:
    """Give the finished folder its manifest and its name."""
    rejected = [(record.source["file"], *reject) for record in records for reject in record.source.get("rejected", ())]
    if rejected:
        text = "".join(f"{file}\t{line}\t{reason}\n" for file, line, reason in rejected)
        with replacing(partial / REJECTS) as temporary:
            temporary.write_text(f"file\tline\treason\n{text}", encoding="utf-8")
        log.warning("bad lines left out: %d, listed in %s", len(rejected), folder / REJECTS)
    manifest.write(partial)
    for record in records:
        (partial / seen_name(record.day)).unlink()
        (partial / record_name(record.day)).unlink()
    _fit_file(partial / VOCABULARY).unlink(missing_ok=True)
    try:
        partial.rename(folder)
        sync(folder.parent)
    except OSError:
        # On a file system without locks another process may have made the equal copy first.
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)
