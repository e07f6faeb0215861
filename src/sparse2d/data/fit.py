"""Fit a vocabulary on the training rows, and on no other."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sparse2d.config import NUM_SPARSE, SplitKind
from sparse2d.data.counting import TokenCounts
from sparse2d.data.fastparse import Parsed
from sparse2d.data.job import IngestJob
from sparse2d.data.progress import OnRows
from sparse2d.data.sources import DaySource, Rejects, day_sources, synthetic_days
from sparse2d.data.splits import split_ranges
from sparse2d.data.threads import in_order
from sparse2d.data.vocabulary import Vocabulary

# No day has more rows: places of different days stay apart.
_DAY_PLACES = 1 << 40


def fit_vocabulary(job: IngestJob, folder: Path) -> Vocabulary:
    """Tokens that the training rows hold at least ``data.min_count`` times; runs are kept in ``folder`` meanwhile.

    Raises:
        UserError: for a bad line, too few rows, or a damaged file.
    """
    wanted = _training_rows(job)
    counts = TokenCounts(folder)
    day_places = {day: index * _DAY_PLACES for index, day in enumerate(job.days)}

    def counting(source: DaySource) -> Iterator[tuple[Callable[[], None], tuple[int, float]]]:
        rows = wanted[source.day]
        for first_row, parsed, share in _pieces(job, source):
            part = slice(max(rows.start - first_row, 0), max(rows.stop - first_row, 0))
            place = day_places[source.day] + first_row + part.start
            tokens, missing = parsed.rows.tokens[part], parsed.rows.tokens_missing[part]
            yield partial(counts.add, tokens, missing, place), (len(parsed.rows), share)

    def count(source: DaySource, on_rows: OnRows) -> None:
        for _, progress in in_order(counting(source), job.pool, job.pieces_at_once):
            on_rows(*progress)

    sources = [source for source in day_sources(job.data, job.inputs, Rejects(job.data)) if len(wanted[source.day])]
    job.over_days("counting tokens", sources, count)
    return Vocabulary(list(job.pool.map(partial(counts.frequent, at_least=job.data.min_count), range(NUM_SPARSE))))


def _training_rows(job: IngestJob) -> dict[int, range]:
    """The rows of each day that train, counted within the day."""
    data = job.data
    if data.split is SplitKind.last_day:
        *training, last = job.days
        return {day: range(_DAY_PLACES) for day in training} | {last: range(0)}
    if job.inputs:
        num_rows = job.over_days(
            "counting rows", day_sources(data, job.inputs, Rejects(data)), partial(_count_rows, job)
        )
    else:
        num_rows = {day: len(rows) for day, rows in enumerate(synthetic_days(data))}
    day_rows = [num_rows[day] for day in job.days]
    train = split_ranges(day_rows, data, data.raw_dir or data.path)["train"]
    wanted, first_row = {}, 0
    for day, rows in zip(job.days, day_rows, strict=True):
        wanted[day] = range(max(train.start - first_row, 0), min(max(train.stop - first_row, 0), rows))
        first_row += rows
    return wanted


def _count_rows(job: IngestJob, source: DaySource, on_rows: OnRows) -> int:
    rows = 0
    for first_row, parsed, share in _pieces(job, source):
        rows = first_row + len(parsed.rows)
        on_rows(len(parsed.rows), share)
    return rows


def _pieces(job: IngestJob, source: DaySource) -> Iterator[tuple[int, Parsed, float]]:
    """The first row's place in the day, the rows, and the share of the day that is read with them, in order."""
    first_row = lines = 0
    for parsed, share in in_order(source.tasks(), job.pool, job.pieces_at_once):
        for place, reason in parsed.rejects:
            source.refuse(lines + place + 1, reason)
        yield first_row, parsed, share
        first_row += len(parsed.rows)
        lines += parsed.num_lines
