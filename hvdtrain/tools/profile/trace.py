"""The trace of a recording in Chrome's format, which Perfetto and chrome://tracing open."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.tools.profile.recording import Recording, to_common
from hvdtrain.workers.activity import TRAINING


class StepWait(NamedTuple):
    """A step of one worker; times are nanoseconds since the epoch by rank 0's clock.

    Attributes:
        step: the step.
        begin_ns: when the worker began with it.
        ready_ns: when its gradients were computed.
        all_ready_ns: when those of all workers were.
        reduced_ns: when the sums had arrived.
        last_rank: the worker that was ready last.
    """

    step: int
    begin_ns: int
    ready_ns: int
    all_ready_ns: int
    reduced_ns: int
    last_rank: int


def waits_by_rank(recordings: Sequence[Recording]) -> dict[int, list[StepWait]]:
    """Return the steps of each worker that all of them have marks of, by rank; none of a single worker."""
    if len(recordings) < 2:
        return {}
    marks = {
        recording.rank: {
            mark.step: (
                to_common(mark.ready_ns, recording.before, recording.after),
                to_common(mark.reduced_ns, recording.before, recording.after),
            )
            for mark in recording.marks
        }
        for recording in recordings
    }
    steps = sorted(set.intersection(*(set(found) for found in marks.values())))
    waits: dict[int, list[StepWait]] = {recording.rank: [] for recording in recordings}
    for step in steps:
        last_rank = max(marks, key=lambda rank: marks[rank][step][0])
        all_ready_ns = marks[last_rank][step][0]
        for recording in recordings:
            ready_ns, reduced_ns = marks[recording.rank][step]
            begin_ns = _begin_of(recording, step, ready_ns)
            wait = StepWait(step, begin_ns, ready_ns, all_ready_ns, max(all_ready_ns, reduced_ns), last_rank)
            waits[recording.rank].append(wait)
    return waits


def last_ranks(waits: Mapping[int, Sequence[StepWait]]) -> dict[int, int]:
    """Return in how many steps each worker was the last to have its gradients; the most first."""
    counted = Counter(wait.last_rank for wait in next(iter(waits.values()), ()))
    return dict(counted.most_common())


def _begin_of(recording: Recording, step: int, ready_ns: int) -> int:
    """Return when a worker began to train a step."""
    begins = [p.begin_ns for p in recording.phases if p.step == step and p.name == TRAINING]
    return to_common(min(begins), recording.before, recording.after) if begins else ready_ns


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


Event = dict[str, Any]

_LOOP, _STEPS, _THREADS = 0, 1, 2  # places of the tracks of a worker
_TRACKS = 1_000_000  # places of a process
OWN_PART, WAITING, REDUCING = "own part of the step", "waiting for", "all-reduce"


def build_trace(recordings: Sequence[Recording], timeline: Timeline) -> Event:
    """Return the trace of all workers: each is a process, and Horovod's timeline is one after them.

    Times are microseconds since the recording began on rank 0, by its clock.

    Args:
        recordings: those of the workers, in the order of ranks.
        timeline: Horovod's timeline.
    """
    begin_ns = min(to_common(r.begin_ns, r.before, r.after) for r in recordings)
    events: list[Event] = []
    waits = waits_by_rank(recordings)
    for recording in recordings:
        events += _of_worker(recording, begin_ns)
        for wait in waits.get(recording.rank, []):
            step = {"step": wait.step}
            for name, begin, end in (
                (OWN_PART, wait.begin_ns, wait.ready_ns),
                (f"{WAITING} rank {wait.last_rank}", wait.ready_ns, wait.all_ready_ns),
                (REDUCING, wait.all_ready_ns, wait.reduced_ns),
            ):
                if end > begin:
                    track = recording.rank, _STEPS
                    events.append(_span(track, name, begin - begin_ns, end - begin, step))
    events += _of_timeline(timeline, max(r.rank for r in recordings) + 1, begin_ns)
    worst_ns = max(max(r.before.uncertainty_ns, r.after.uncertainty_ns) for r in recordings)
    facts = {
        "begin_seconds_since_epoch": begin_ns / 1e9,
        "clock_uncertainty_ms": worst_ns / 1e6,
        "workers": len(recordings),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _of_worker(recording: Recording, begin_ns: int) -> Iterator[Event]:
    rank = recording.rank
    yield from _process(rank, f"rank {rank} on {recording.host}")
    threads = ["training loop", "step", *recording.operations.threads]
    for place, name in enumerate(threads):
        yield from _thread(rank, place, name)
    for phase in recording.phases:
        at_ns, length = _placed(recording, phase.begin_ns, phase.end_ns)
        arguments = {"step": phase.step} if phase.step else {}
        yield _span((rank, _LOOP), phase.name, at_ns - begin_ns, length, arguments)
    for span in recording.operations.spans:
        at_ns, length = _placed(recording, span.begin_ns, span.end_ns)
        event = _span((rank, _THREADS + span.thread), span.name, at_ns - begin_ns, length)
        yield {**event, "cat": span.kind}


def _placed(recording: Recording, begin_ns: int, end_ns: int) -> tuple[int, int]:
    return to_common(begin_ns, recording.before, recording.after), max(0, end_ns - begin_ns)


def _of_timeline(timeline: Timeline, process: int, begin_ns: int) -> Iterator[Event]:
    if not timeline:
        return
    yield from _process(process, "Horovod, as rank 0 coordinates it")
    places: dict[str, int] = {}
    for tensor in (*(span.tensor for span in timeline.spans), *(mark.tensor for mark in timeline.ready)):
        if tensor not in places:
            places[tensor] = len(places)
            yield from _thread(process, places[tensor], tensor)
    for span in timeline.spans:
        length = span.end_ns - span.begin_ns
        yield _span((process, places[span.tensor]), span.name, span.begin_ns - begin_ns, length)
    for mark in timeline.ready:
        at_us = (mark.at_ns - begin_ns) / 1e3
        name = f"rank {mark.rank} is ready"
        yield {"ph": "i", "s": "t", **track_of(process, places[mark.tensor]), "name": name, "ts": at_us}


def _process(process: int, name: str) -> Iterator[Event]:
    fields = {"ph": "M", **track_of(process, 0)}
    yield {**fields, "name": "process_name", "args": {"name": name}}
    yield {**fields, "name": "process_sort_index", "args": {"sort_index": process}}


def _thread(process: int, place: int, name: str) -> Iterator[Event]:
    fields = {"ph": "M", **track_of(process, place)}
    yield {**fields, "name": "thread_name", "args": {"name": name}}
    yield {**fields, "name": "thread_sort_index", "args": {"sort_index": place}}


def track_of(process: int, place: int) -> Event:
    """Return the numbers of a track.

    Viewers take 0 for the idle task, and may take one number of a thread in two processes for one thread.

    Args:
        process: a rank, or the number after them for Horovod.
        place: the track's place in it.
    """
    return {"pid": process + 1, "tid": _TRACKS * (process + 1) + place}


def _span(
    track: tuple[int, int], name: str, at_ns: int, length_ns: int, arguments: Mapping[str, Any] | None = None
) -> Event:
    event = {"ph": "X", **track_of(*track), "name": name, "ts": at_ns / 1e3, "dur": length_ns / 1e3}
    return {**event, "args": dict(arguments)} if arguments else event
