"""Recordings as workers make them, and the check of a trace against Chrome's format."""

import gzip
from typing import Any

from hvdtrain.backends.recording import OPERATION, Operation, Operations
from hvdtrain.tools.profile.recording import ClockOffset, Phase, Recording, StepMark
from hvdtrain.workers.activity import READING_DATA, TRAINING

MS = 1_000_000
EPOCH_NS = 1_800_000_000 * 1_000_000_000
# a file of gzip whose beginning is whole, but not what it holds: zlib.error
DAMAGED = gzip.compress(b"")[:10] + b"\xff" * 20


def recording(rank: int, ready_ms: float, offset_ms: float = 0.0, reduced_ms: float = 8.0) -> Recording:
    """Return two steps of 10 ms: 1 ms of reading, then an operation of 2 ms that calls one of 1 ms."""
    start = EPOCH_NS + round(offset_ms * MS)
    offset = ClockOffset(round(offset_ms * MS), 100_000)
    made = Recording(rank, f"host{rank}", start, start + 20 * MS, offset)
    made.operations = Operations(["main"], [])
    for place in range(2):
        at, step = start + 10 * MS * place, 20 + place
        made.phases += [Phase(READING_DATA, step, at, at + MS), Phase(TRAINING, step, at + MS, at + 10 * MS)]
        made.marks.append(StepMark(step, at + round(ready_ms * MS), at + round(reduced_ms * MS)))
        made.operations.spans += [
            Operation(0, "outer", at + MS, at + 3 * MS, OPERATION),
            Operation(0, "inner", at + 2 * MS, at + 3 * MS, OPERATION),
        ]
    return made


def horovod_events(tensor: str = "a") -> list[dict[str, Any]]:
    """Return what Horovod writes of a tensor that rank 1 has last, and of a span that it began before."""
    epoch_us = EPOCH_NS // 1000
    return [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": epoch_us}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": tensor}},
        {"ph": "E", "ts": 1000, "pid": 1},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 3000, "pid": 1},
        {"ph": "X", "name": "0", "ts": 3000, "pid": 1, "dur": 0},
        {"ph": "X", "name": "1", "ts": 5000, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 5000, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 5000, "pid": 1},
        {"ph": "B", "name": "MPI_ALLREDUCE", "ts": 5500, "pid": 1},
        {"ph": "E", "ts": 7000, "pid": 1},
        {"ph": "E", "ts": 7500, "pid": 1, "args": {"dtype": "float32"}},
        {"ph": "i", "name": "CYCLE_START", "ts": 8000, "s": "g"},
    ]


def check_trace(trace: dict[str, Any], workers: int) -> None:
    """Check that a trace is one that Perfetto reads, with a process for each worker."""
    names = {f"{of}_{what}" for of in ("process", "thread") for what in ("name", "sort_index")}
    named, threads = dict[int, str](), dict[int, int]()
    for event in trace["traceEvents"]:
        assert min(event["pid"], event["tid"]) > 0
        if event["ph"] == "M":
            assert event["name"] in names
            if event["name"] == "process_name":
                named[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                assert event["tid"] not in threads  # of another process
                threads[event["tid"]] = event["pid"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float)
        assert threads[event["tid"]] == event["pid"]
        assert event["dur"] >= 0
    for rank in range(workers):
        assert named[rank + 1].startswith(f"rank {rank} on ")
        assert any(event["ph"] == "X" and event["pid"] == rank + 1 for event in trace["traceEvents"])
