"""The trace of a recording in Chrome's format, which Perfetto and chrome://tracing open."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.tools.profile.costs import waits_by_rank
from hvdtrain.tools.profile.recording import Recording

Event = dict[str, Any]

_LOOP, _STEPS, _THREADS = 0, 1, 2  # places of the tracks of a worker
_TRACKS = 1_000_000  # places of a process


def build_trace(recordings: Sequence[Recording]) -> Event:
    """Return the trace of all workers: each is a process, and Horovod's timeline is one after them.

    Times are microseconds since the recording began on rank 0, by its clock.

    Args:
        recordings: those of the workers, in the order of ranks; the first one has Horovod's timeline.
    """
    begin_ns = min(recording.common(recording.begin_ns) for recording in recordings)
    end_ns = max(recording.common(recording.end_ns) for recording in recordings)
    events: list[Event] = []
    waits = waits_by_rank(recordings)
    for recording in recordings:
        events += _of_worker(recording, begin_ns)
        for wait in waits.get(recording.rank, []):
            for name, begin, end in (
                ("own part of the step", wait.begin_ns, wait.ready_ns),
                (f"waiting for rank {wait.last_rank}", wait.ready_ns, wait.all_ready_ns),
                ("all-reduce", wait.all_ready_ns, wait.reduced_ns),
            ):
                if end > begin:
                    track = recording.rank, _STEPS
                    events.append(_span(track, name, begin - begin_ns, end - begin, {"step": wait.step}))
    process = max(recording.rank for recording in recordings) + 1
    events += _of_horovod(recordings[0].timeline, process, begin_ns, end_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_worker(recording: Recording, begin_ns: int) -> Iterator[Event]:
    rank, common = recording.rank, recording.common
    yield from _process(rank, f"rank {rank} on {recording.host}")
    for place, name in enumerate(["training loop", "step", *recording.operations.threads]):
        yield from _named("thread", rank, place, name)
    for phase in recording.phases:
        at_ns, arguments = common(phase.begin_ns) - begin_ns, {"step": phase.step} if phase.step else {}
        yield _span((rank, _LOOP), phase.name, at_ns, phase.end_ns - phase.begin_ns, arguments)
    for span in recording.operations.spans:
        at_ns, track = common(span.begin_ns) - begin_ns, (rank, _THREADS + span.thread)
        yield {**_span(track, span.name, at_ns, span.end_ns - span.begin_ns), "cat": span.kind}


def _of_horovod(
    timeline: Iterable[Mapping[str, Any]], process: int, begin_ns: int, end_ns: int
) -> Iterator[Event]:
    """Yield what the timeline has between two times: in it each tensor is a process, here a track.

    A span whose beginning or end was not recorded is left out.
    """
    epoch_us, places = 0, dict[int, int]()
    open_spans: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in timeline:
        kind, tensor, arguments = event.get("ph"), event.get("pid", 0), event.get("args", {})
        if kind == "M" and event["name"] == "process_name":
            epoch_us = arguments.get("start_time_since_epoch_in_micros", epoch_us)
            if "name" in arguments and tensor not in places:
                if not places:
                    yield from _process(process, "Horovod, as rank 0 coordinates it")
                places[tensor] = len(places)
                yield from _named("thread", process, places[tensor], arguments["name"])
        elif kind == "B":
            open_spans[tensor].append((event["name"], 1000 * (epoch_us + event["ts"])))
        elif kind == "E" and open_spans[tensor]:
            (name, since_ns), at_ns = open_spans[tensor].pop(), 1000 * (epoch_us + event["ts"])
            if tensor in places and at_ns >= begin_ns and since_ns <= end_ns:
                yield _span((process, places[tensor]), name, since_ns - begin_ns, at_ns - since_ns)


def _process(process: int, name: str) -> Iterator[Event]:
    yield from _named("process", process, 0, name)


def _named(what: str, process: int, place: int, name: str) -> Iterator[Event]:
    """Yield the name of a process or a thread, and its place among the others."""
    fields = {"ph": "M", **track_of(process, place)}
    index = process if what == "process" else place
    yield {**fields, "name": f"{what}_name", "args": {"name": name}}
    yield {**fields, "name": f"{what}_sort_index", "args": {"sort_index": index}}


def track_of(process: int, place: int) -> Event:
    """Return the numbers of a track of a rank, or of the number after them for Horovod.

    Viewers take 0 for the idle task, and may take one number of a thread in two processes for one thread.
    """
    return {"pid": process + 1, "tid": _TRACKS * (process + 1) + place}


def _span(
    track: tuple[int, int], name: str, at_ns: int, length_ns: int, arguments: Mapping[str, Any] | None = None
) -> Event:
    times = {"ts": at_ns / 1e3, "dur": max(0, length_ns) / 1e3}
    event = {"ph": "X", **track_of(*track), "name": name, **times}
    return {**event, "args": dict(arguments)} if arguments else event
