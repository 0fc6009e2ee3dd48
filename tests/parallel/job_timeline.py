"""One worker whose timeline is idle, recorded, cut off by Horovod's end, and recorded again."""

import json
import time

import horovod.torch as hvd
import torch


def idle_share() -> float:
    begun, busy = time.monotonic(), time.process_time()
    time.sleep(1)
    return (time.process_time() - busy) / (time.monotonic() - begun)


def record(path: str) -> None:
    hvd.start_timeline(path)
    for number in range(50):
        hvd.allreduce(torch.ones(10), name=f"tensor {number % 5}")
    hvd.stop_timeline()


def record_to_the_end() -> None:
    hvd.start_timeline("second.json")
    for number in range(200):
        hvd.allreduce_async_(torch.ones(10), name=f"late {number}")
    hvd.shutdown()


if __name__ == "__main__":
    hvd.init()
    shares = [idle_share()]
    record("first.json")
    shares.append(idle_share())
    for _ in range(3):  # the writer may have nothing left to write
        record_to_the_end()
        hvd.init()
    record("third.json")
    record("/dev/full")
    record("/missing/folder.json")
    counts = []
    for name in ("first.json", "third.json"):
        with open(name) as file:
            counts.append(len(json.load(file)))
    print(json.dumps({"shares": shares, "events": counts}))
