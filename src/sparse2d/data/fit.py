"""Fit a vocabulary on the training rows, and on no other."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from sparse2d.config import NUM_SPARSE, DataConfig, SplitKind
from sparse2d.data.counting import TokenCounts
from sparse2d.data.digests import KnownDigests
from sparse2d.data.fastparse import Parsed, parse
from sparse2d.data.progress import Progress
from sparse2d.data.raw import Digest, read_text
from sparse2d.data.sources import Rejects
from sparse2d.data.splits import split_ranges
from sparse2d.data.threads import in_order, side_by_side
from sparse2d.data.vocabulary import Vocabulary
from sparse2d.errors import UserError

# No day has more rows: places of different days stay apart.
_DAY_PLACES = 1 << 40


def fit_vocabulary(
    data: DataConfig,
    inputs: Mapping[int, Path],
    folder: Path,
    known: KnownDigests,
    pool: Executor,
    workers: int,
    bar: Progress,
) -> Vocabulary:
    """Tokens that the training rows hold at least ``data.min_count`` times; runs are kept in ``folder`` meanwhile.

    Raises:
        UserError: for a bad line, too few rows, or a damaged file.
    """
    run = _Pass(data, inputs, known, pool, workers, bar)
    wanted = _training_rows(data, inputs, run)
    counts, lock = TokenCounts(folder), threading.Lock()
    index = {day: place for place, day in enumerate(inputs)}

    def count(day: int, first_row: int, parsed: Parsed) -> None:
        rows = parsed.rows
        part = slice(max(wanted[day].start - first_row, 0), max(wanted[day].stop - first_row, 0))
        with lock:
            first = index[day] * _DAY_PLACES + first_row + part.start
            counts.add(rows.tokens[part], rows.tokens_missing[part], first)

    run.over([day for day, rows in wanted.items() if len(rows)], "counting tokens", count)
    return Vocabulary([counts.frequent(column, data.min_count) for column in range(NUM_SPARSE)])


def _training_rows(data: DataConfig, inputs: Mapping[int, Path], run: "_Pass") -> dict[int, range]:
    """The rows of each day that train, counted within the day."""
    if data.split is SplitKind.last_day and len(inputs) > 1:
        *training, last = inputs
        return {day: range(_DAY_PLACES) for day in training} | {last: range(0)}
    num_rows = dict.fromkeys(inputs, 0)

    def count(day: int, first_row: int, parsed: Parsed) -> None:
        num_rows[day] = first_row + len(parsed.rows)

    run.over(list(inputs), "counting rows", count)
    train = split_ranges(list(num_rows.values()), data, data.raw_dir or data.path)["train"]
    wanted, first_row = {}, 0
    for day, rows in num_rows.items():
        wanted[day] = range(max(train.start - first_row, 0), min(max(train.stop - first_row, 0), rows))
        first_row += rows
    return wanted


class _Pass:
    """One reading of raw days, side by side, each in its order."""

    def __init__(
        self,
        data: DataConfig,
        inputs: Mapping[int, Path],
        known: KnownDigests,
        pool: Executor,
        workers: int,
        bar: Progress,
    ) -> None:
        self._data = data
        self._inputs = inputs
        self._known = known
        self._pool = pool
        self._workers = workers
        self._bar = bar

    def over(self, days: list[int], what: str, use: Callable[[int, int, Parsed], None]) -> None:
        """Call ``use`` with the day, the first row's place in it, and the rows of each piece."""
        rejects = Rejects(self._data)

        def one_day(day: int, stop: threading.Event) -> str:
            heard = on_rows(day, stop)
            path, digest = self._inputs[day], hashlib.sha256()
            first_row = lines = 0
            for parsed, share in in_order(self._tasks(path, digest, rejects.most), self._pool, self._workers + 2):
                for place, reason in parsed.rejects:
                    rejects.add(path, lines + place + 1, reason)
                use(day, first_row, parsed)
                first_row += len(parsed.rows)
                lines += parsed.num_lines
                heard(len(parsed.rows), share)
            return digest.hexdigest()

        errors: dict[int, UserError] = {}
        with self._bar.counting(what, len(days)) as on_rows:
            for day, result in side_by_side(one_day, days, self._workers):
                if isinstance(result, UserError):
                    errors[day] = result
                else:
                    self._known.put(self._inputs[day], result)
        if errors:
            raise errors[min(errors)]

    @staticmethod
    def _tasks(path: Path, digest: Digest, most: int) -> Iterator[tuple[Callable[[], Parsed], float]]:
        size = max(path.stat().st_size, 1)
        for text, done in read_text(path, digest):
            yield partial(parse, text, most), done / size
