"""One worker whose timeline is idle, recorded, cut off by Horovod's end, and recorded again."""

import json
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch


def idle_share() -> float:
    begun, busy = time.monotonic(), time.process_time()
    time.sleep(1)
    return (time.process_time() - busy) / (time.monotonic() - begun)


def record(path: str, end: Callable[[], None] = hvd.stop_timeline) -> None:
    hvd.start_timeline(path)
    for number in range(50):
        hvd.allreduce(torch.ones(10), name=f"tensor {number % 5}")
    end()


def completed(path: str) -> int:
    """Return how many operations have their end in a timeline."""
    with open(path) as file:
        return sum(event["ph"] == "E" and "dtype" in event.get("args", {}) for event in json.load(file))


def record_to_the_end() -> None:
    hvd.start_timeline("second.json")
    for number in range(200):
        hvd.allreduce_async_(torch.ones(10), name=f"late {number}")
    hvd.shutdown()


if __name__ == "__main__":
    hvd.init()
    shares, ends = [idle_share()], list[int]()
    record("first.json")
    shares.append(idle_share())
    for _ in range(3):  # the writer may have nothing left to write
        record_to_the_end()
        hvd.init()
        record("ended.json", hvd.shutdown)
        ends.append(completed("ended.json"))
        hvd.init()
    record("third.json")
    record("/dev/full")
    record("/missing/folder.json")
    counts = []
    for name in ("first.json", "third.json"):
        with open(name) as file:
            counts.append(len(json.load(file)))
    print(json.dumps({"shares": shares, "events": counts, "ends": ends}))
