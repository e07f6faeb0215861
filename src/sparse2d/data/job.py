"""One ingest under way, and its passes over the days: one to store them, before it maybe some to fit a vocabulary."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sparse2d.config import DataConfig
from sparse2d.data.digests import KnownDigests
from sparse2d.data.progress import OnRows, Progress
from sparse2d.data.sources import DaySource
from sparse2d.data.threads import side_by_side
from sparse2d.errors import UserError

log = logging.getLogger(__name__)

R = TypeVar("R")

_AHEAD = 2


@dataclass(frozen=True)
class IngestJob:
    """What is read (no inputs: the planted teacher), the folder to work in, and the threads to work with."""

    data: DataConfig
    inputs: Mapping[int, Path]
    folder: Path
    known: KnownDigests
    pool: Executor
    workers: int
    bar: Progress

    @property
    def days(self) -> list[int]:
        """The days, in order."""
        return list(self.inputs) or list(range(self.data.synthetic.days))

    @property
    def pieces_at_once(self) -> int:
        """How many pieces of a day may be under way: enough for no thread to wait, whatever the day's length."""
        return self.workers + _AHEAD

    def over_days(
        self, what: str, sources: Sequence[DaySource], one_day: Callable[[DaySource, OnRows], R]
    ) -> dict[int, R]:
        """Results of ``one_day`` by day, days side by side; it tells of rows and of the share of its day done.

        A bad day does not keep the others from being finished: its error is told at once and raised at the end.

        Raises:
            UserError: the first bad day's.
        """
        results: dict[int, R] = {}
        errors: dict[int, UserError] = {}

        def listened_to(source: DaySource, stop: threading.Event) -> R:
            return one_day(source, listener(source.day, stop))

        with self.bar.counting(what, len(sources)) as listener:
            for source, result in side_by_side(listened_to, sources, self.workers):
                if isinstance(result, UserError):
                    errors[source.day] = result
                    if len(sources) > 1:
                        log.error("%s", result)
                    continue
                results[source.day] = result
                if self.inputs:
                    self.known.put(self.inputs[source.day], source.described()["sha256"])
        if errors:
            raise errors[min(errors)]
        return results
