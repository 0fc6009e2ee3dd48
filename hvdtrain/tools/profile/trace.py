"""The trace of a recording in Chrome's format, which Perfetto and chrome://tracing open."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.tools.profile.clocks import to_common
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.tools.profile.timeline import Timeline
from hvdtrain.tools.profile.waits import waits_by_rank

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
