"""Reading ahead: background threads compute results before they are needed, in order."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

# when the results are no longer needed, reads that have begun may take this long to finish
_CLOSE_SECONDS = 1.0


def read_ahead(read: Callable[[int], T], count: int, threads: int) -> Generator[T, None, None]:
    """Yield ``read(0)``, ``read(1)``, ..., ``read(count - 1)``, computed ahead by background threads.

    At most ``threads + 2`` results beyond the one that was yielded last are computed or kept. If
    ``read`` raises, its exception is raised in the place of that result, with its own traceback,
    after the results before it.

    The threads start with the first result and end with the last one, with an exception, or when
    the generator is closed. Reads that have not begun by then are dropped; a read that never
    returns does not block closing.

    Args:
        read: a function that any number of threads may call at once.
        count: number of results.
        threads: number of threads.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix="hvdtrain-read-ahead")
    pending: deque[Future[T]] = deque()
    try:
        for index in range(count):
            pending.append(executor.submit(read, index))
            if len(pending) > threads + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        wait([future for future in pending if not future.cancelled()], _CLOSE_SECONDS)
