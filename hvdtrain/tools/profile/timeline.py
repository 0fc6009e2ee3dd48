"""Horovod's timeline: what happened with each tensor, as rank 0 saw it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

_NEGOTIATE = "NEGOTIATE_"


class TensorSpan(NamedTuple):
    """A span of a tensor.

    Attributes:
        tensor: its name.
        name: what was done: NEGOTIATE_ALLREDUCE, ALLREDUCE, MPI_ALLREDUCE and so on.
        begin_ns: when it began, in nanoseconds since the epoch by rank 0's clock.
        end_ns: when it ended.
        depth: how many spans of the tensor it lies in.
        size: the tensor's bytes; 0 if Horovod did not write them.
    """

    tensor: str
    name: str
    begin_ns: int
    end_ns: int
    depth: int
    size: int = 0

    @property
    def is_negotiation(self) -> bool:
        """Whether it lasts from the first worker that was ready to the last."""
        return self.name.startswith(_NEGOTIATE)


class RankReady(NamedTuple):
    """A worker told rank 0 that it is ready to reduce a tensor."""

    tensor: str
    rank: int
    at_ns: int


@dataclass
class Timeline:
    """What the timeline holds.

    Attributes:
        spans: the spans, in the order of their beginnings.
        ready: who was ready when. Horovod notes it only where workers agree on a tensor anew: not of tensors
            whose agreement it has cached, which are all from the second step on.
    """

    spans: list[TensorSpan] = field(default_factory=list)
    ready: list[RankReady] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether it holds anything."""
        return bool(self.spans or self.ready)

    def within(self, begin_ns: int, end_ns: int) -> "Timeline":
        """Return what lies between two times."""
        return Timeline(
            [span for span in self.spans if span.begin_ns < end_ns and span.end_ns > begin_ns],
            [mark for mark in self.ready if begin_ns <= mark.at_ns <= end_ns],
        )

    def last_ready(self) -> dict[int, int]:
        """Return how often each rank was the last to be ready, where the timeline tells it."""
        last: dict[tuple[str, int], RankReady] = {}
        seen: dict[str, int] = defaultdict(int)
        ranks: dict[str, set[int]] = defaultdict(set)
        for mark in self.ready:
            if mark.rank in ranks[mark.tensor]:  # of the next step
                seen[mark.tensor] += 1
                ranks[mark.tensor] = set()
            ranks[mark.tensor].add(mark.rank)
            last[mark.tensor, seen[mark.tensor]] = mark
        counts: dict[int, int] = defaultdict(int)
        for mark in last.values():
            counts[mark.rank] += 1
        return dict(counts)

    def size_of(self, tensor: str) -> int:
        """Return a tensor's bytes, the most that it had; 0 if they are not known."""
        return max((span.size for span in self.spans if span.tensor == tensor), default=0)

    def seconds_by_tensor(self) -> dict[str, float]:
        """Return how long each tensor's operations took, without agreeing on it; the longest first."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.depth == 0 and not span.is_negotiation:
                seconds[span.tensor] += (span.end_ns - span.begin_ns) / 1e9
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def read_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Return what the events say that Horovod wrote.

    A span whose beginning or end was not recorded is left out.
    """
    found, epoch_us = Timeline(), 0
    tensors: dict[int, str] = {}
    open_spans: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        kind, process, arguments = event.get("ph"), event.get("pid", 0), event.get("args", {})
        if kind == "M" and event["name"] == "process_name":
            epoch_us = arguments.get("start_time_since_epoch_in_micros", epoch_us)
            if "name" in arguments:
                tensors[process] = arguments["name"]
            continue
        if kind not in ("B", "E", "X"):
            continue
        at_ns, tensor = 1000 * (epoch_us + event["ts"]), tensors.get(process, str(process))
        if kind == "B":
            open_spans[process].append((event["name"], at_ns))
        elif kind == "X" and event["name"].isdecimal():
            found.ready.append(RankReady(tensor, int(event["name"]), at_ns))
        elif kind == "E" and open_spans[process]:
            name, begin_ns = open_spans[process].pop()
            depth, size = len(open_spans[process]), _bytes_of(arguments)
            found.spans.append(TensorSpan(tensor, name, begin_ns, at_ns, depth, size))
    found.spans.sort(key=lambda span: span.begin_ns)
    return found


def _bytes_of(arguments: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor whose type and shape Horovod wrote: float32 and "[3, 4]"; otherwise 0."""
    try:
        shape = [int(length) for length in str(arguments["shape"]).strip("[]").split(",") if length.strip()]
        return int(np.dtype(arguments["dtype"]).itemsize) * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        return 0
