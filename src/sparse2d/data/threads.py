"""Days side by side on threads, and results in the order of their tasks."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

from sparse2d.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def in_order(tasks: Iterable[tuple[Callable[[], R], T]], pool: Executor, most: int) -> Iterator[tuple[R, T]]:
    """Results of tasks in their order, each with its tag; at most ``most`` tasks are under way."""
    under_way: deque[tuple[Future[R], T]] = deque()
    try:
        for task, tag in tasks:
            under_way.append((pool.submit(task), tag))
            if len(under_way) >= most:
                future, first = under_way.popleft()
                yield future.result(), first
        while under_way:
            future, first = under_way.popleft()
            yield future.result(), first
    finally:
        for future, _ in under_way:
            future.cancel()


def side_by_side(
    function: Callable[[T, threading.Event], R], items: Iterable[T], workers: int
) -> Iterator[tuple[T, R | UserError]]:
    """Results as they come, or the user's errors; after any other error, or Ctrl-C, nothing more is done.

    The event is then set: what is under way is expected to end soon.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as threads:
        futures = {threads.submit(function, item, stop): item for item in items}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except UserError as error:
                    yield futures[future], error
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
