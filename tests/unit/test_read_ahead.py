"""Reading ahead: results in order, bounded, with errors in their place and no thread left."""

import threading
import time

import pytest

from hvdtrain.data.feed import read_ahead


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hvdtrain-read-ahead")]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_is_read_than_two_reads_ahead_of_what_the_threads_do(threads):
    begun: list[int] = []
    enough = threading.Event()

    def read(index: int) -> int:
        begun.append(index)
        if len(begun) == 4 + threads + 2:
            enough.set()
        return index

    results = read_ahead(read, 1000, threads)
    taken = [next(results) for _ in range(4)]
    assert enough.wait(60)
    results.close()
    assert taken == [0, 1, 2, 3]
    assert sorted(begun) == list(range(4 + threads + 2))


def test_a_read_that_hangs_does_not_block_closing():
    release = threading.Event()

    def read(index: int) -> None:
        if index:
            release.wait(60)

    results = read_ahead(read, 10, threads=1)
    next(results)
    begun_seconds = time.perf_counter()
    results.close()
    assert time.perf_counter() - begun_seconds < 30
    release.set()
    for thread in reading_threads():
        thread.join(timeout=60)
    assert reading_threads() == []
