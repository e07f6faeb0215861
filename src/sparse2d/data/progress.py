"""A progress bar over days that are converted side by side: rows per second and time left."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

OnRows = Callable[[int, float], object]


class StoppedError(Exception):
    """Work was given up since other work failed."""


class Progress:
    """On a terminal, a bar on stderr; elsewhere, nothing."""

    def __init__(self, wanted: bool) -> None:
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[rows]:,} rows, {task.fields[rows_per_s]:,.0f} rows/s"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
            disable=not (wanted and console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def counting(self, name: str, days: int) -> Iterator[Callable[[int, threading.Event], OnRows]]:
        """Yield a function that makes each day's listener: it hears of more rows and of the share of its day done.

        A listener raises ``StoppedError`` once its event is set: that ends a day which nobody waits for any more.
        """
        task = self._bar.add_task(name, total=days, rows=0, rows_per_s=0.0)
        shares: dict[int, float] = {}
        rows, started = 0, time.monotonic()
        lock = threading.Lock()

        def listener(day: int, stop: threading.Event) -> OnRows:
            def on_rows(more: int, share: float) -> None:
                nonlocal rows
                if stop.is_set():
                    raise StoppedError
                with lock:
                    rows += more
                    shares[day] = share
                    rate = rows / (time.monotonic() - started)
                    self._bar.update(task, completed=sum(shares.values()), rows=rows, rows_per_s=rate)

            return on_rows

        try:
            yield listener
        finally:
            self._bar.remove_task(task)
