"""What the recordings of all workers show: what a step costs, and a trace in Chrome's format."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.backends.recording import KERNEL, OPERATION, Operation
from hvdtrain.schedule import StepWindow
from hvdtrain.storage.text import counted
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.workers.activity import READING_DATA, TRAINING

_SHOWN = 5
_STANDS_OUT = 1.5  # times the mean of the workers
_LEAST_SHARE = 0.005
_COLLECTIVE = "Horovod"  # operations that wait for other workers are counted as communication


class StepWait(NamedTuple):
    """A step of one worker; times are nanoseconds since the epoch by rank 0's clock."""

    step: int
    begin_ns: int
    ready_ns: int  # its gradients were computed
    all_ready_ns: int  # those of all workers were
    reduced_ns: int  # the sums had arrived
    last_rank: int  # the worker that was ready last


Waits = dict[int, list[StepWait]]  # of each worker


def waits_by_rank(recordings: Sequence[Recording]) -> Waits:
    """Return the steps of each worker that all of them have marks of, by rank; none of a single worker."""
    if len(recordings) < 2:
        return {}
    marks = {
        one.rank: {m.step: (one.common(m.ready_ns), one.common(m.reduced_ns)) for m in one.marks}
        for one in recordings
    }
    waits: Waits = {one.rank: [] for one in recordings}
    for step in sorted(set.intersection(*(set(found) for found in marks.values()))):
        last_rank = max(marks, key=lambda rank: marks[rank][step][0])
        all_ready_ns = marks[last_rank][step][0]
        for one in recordings:
            ready_ns, reduced_ns = marks[one.rank][step]
            begins = [one.common(p.begin_ns) for p in one.phases if p.step == step and p.name == TRAINING]
            begin_ns, end_ns = min(begins, default=ready_ns), max(all_ready_ns, reduced_ns)
            waits[one.rank].append(StepWait(step, begin_ns, ready_ns, all_ready_ns, end_ns, last_rank))
    return waits


def _last_ranks(waits: Waits) -> dict[int, int]:
    """Return in how many steps each worker was the last to have its gradients; the most first."""
    return dict(Counter(wait.last_rank for wait in next(iter(waits.values()), ())).most_common())


def self_seconds(recording: Recording) -> dict[str, float]:
    """Return the seconds of each operation of a worker in its steps, by name."""
    kinds = {span.kind for span in recording.operations.spans}
    kind = KERNEL if KERNEL in kinds else OPERATION
    steps = [(p.begin_ns, p.end_ns) for p in recording.phases if p.name == TRAINING]
    by_thread: dict[int, list[Operation]] = defaultdict(list)
    for span in recording.operations.spans:
        if span.kind == kind and not span.name.startswith(_COLLECTIVE):
            by_thread[span.thread].append(span)
    seconds: dict[str, float] = defaultdict(float)
    for spans in by_thread.values():
        for name, nanoseconds in _own(spans, steps if kind == OPERATION else None):
            seconds[name] += nanoseconds / 1e9
    return dict(seconds)


def _own(spans: list[Operation], steps: list[tuple[int, int]] | None) -> list[tuple[str, int]]:
    """Return name and own nanoseconds of each span of a thread that begins in a step."""
    found: list[tuple[str, int]] = []
    open_spans: list[tuple[int, int]] = []  # place in `found`, end
    place = 0
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        if steps is not None:
            while place < len(steps) and steps[place][1] <= span.begin_ns:
                place += 1
            if place == len(steps) or span.begin_ns < steps[place][0]:
                continue
        while open_spans and open_spans[-1][1] <= span.begin_ns:
            open_spans.pop()
        length = span.end_ns - span.begin_ns
        if open_spans:
            parent, end_ns = open_spans[-1]
            name, own = found[parent]
            found[parent] = name, max(0, own - min(length, end_ns - span.begin_ns))
        open_spans.append((len(found), span.end_ns))
        found.append((span.name, length))
    return found


def find_costs(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return what the recorded steps cost, as ``costs.json`` has it; docs/profile.md describes it."""
    steps = sorted({phase.step for one in recordings for phase in one.phases if phase.name == TRAINING})
    seconds = statistics.fmean((r.end_ns - r.begin_ns) / 1e9 for r in recordings)
    waits = waits_by_rank(recordings)
    costs = []
    for kind, what, by_rank in (*_phases(recordings), *_in_steps(recordings, waits)):
        if any(by_rank):
            most, mean = max(by_rank), statistics.fmean(by_rank)
            stands_out = len(by_rank) > 1 and most >= _STANDS_OUT * mean and kind != "wait"
            where = f" (most on rank {recordings[by_rank.index(most)].rank})" if stands_out else ""
            share = round(mean / seconds, 6) if seconds else 0.0
            per_step = 1e3 * mean / (len(steps) or 1)
            costs.append({"kind": kind, "what": what + where, "share": share, "ms_per_step": per_step})
    return {
        "steps": steps,
        "workers": len(recordings),
        "seconds": seconds,
        "step_ms": 1e3 * seconds / (len(steps) or 1),
        "costs": sorted(costs, key=lambda cost: -float(cost["ms_per_step"])),
        "ready_last": {str(rank): count for rank, count in _last_ranks(waits).items()},
        "clock_uncertainty_ms": max(recording.clock.uncertainty_ns for recording in recordings) / 1e6,
        "problems": [problem for recording in recordings for problem in recording.problems],
    }


def lines_of(costs: Mapping[str, Any]) -> list[str]:
    """Return what is shown of the costs: the steps, and the largest costs."""
    steps, workers = costs["steps"], counted(costs["workers"], "worker")
    what = StepWindow(steps[0], steps[-1]).describe() if steps else "no step"
    each = f", {costs['step_ms']:.3g} ms each" if steps else ""
    return [
        f"profile of {what} with {workers}{each}; the largest shares of the workers' time:",
        *(
            f"  {cost['share']:4.0%}  {cost['what']}, {cost['ms_per_step']:.3g} ms a step"
            for cost in costs["costs"][:_SHOWN]
            if cost["share"] >= _LEAST_SHARE
        ),
    ]


CostByRank = tuple[str, str, list[float]]


def _phases(recordings: Sequence[Recording]) -> Iterator[CostByRank]:
    """Yield what the training thread did apart from steps, and the time between that."""
    for name in dict.fromkeys(phase.name for recording in recordings for phase in recording.phases):
        if name != TRAINING:
            by_rank = [recording.seconds_of(name) for recording in recordings]
            is_data = name == READING_DATA
            what = "waiting for data" if is_data else name.removesuffix(" after step")
            yield "data" if is_data else "other", what, by_rank
    busy = [sum(phase.end_ns - phase.begin_ns for phase in one.phases) for one in recordings]
    gaps = [max(0, r.end_ns - r.begin_ns - ns) / 1e9 for r, ns in zip(recordings, busy, strict=True)]
    yield "other", "the recording itself, which notes what begins and ends", gaps


def _in_steps(recordings: Sequence[Recording], waits: Waits) -> Iterator[CostByRank]:
    """Yield what the time in steps consists of: waiting, reducing, operations, and the rest."""
    last, count = _last_ranks(waits), len(next(iter(waits.values()), ()))
    waiting = {rank: [0.0] * len(recordings) for rank in last}
    reducing, rest = [0.0] * len(recordings), [0.0] * len(recordings)
    operations: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(recordings))
    for place, recording in enumerate(recordings):
        in_steps = recording.seconds_of(TRAINING)
        for wait in waits.get(recording.rank, ()):
            waiting[wait.last_rank][place] += (wait.all_ready_ns - wait.ready_ns) / 1e9
            reducing[place] += (wait.reduced_ns - wait.all_ready_ns) / 1e9
        waited = sum(by_rank[place] for by_rank in waiting.values()) + reducing[place]
        if waited > in_steps:  # clocks of two hosts are compared with an error
            for by_rank in (*waiting.values(), reducing):
                by_rank[place] *= in_steps / waited
        left = max(0.0, in_steps - waited)
        own = self_seconds(recording)
        total = sum(own.values())
        scale = min(1.0, left / total) if total else 0.0
        for name, seconds in own.items():
            operations[name][place] = scale * seconds
        rest[place] = left - scale * total
    for rank, by_rank in waiting.items():
        last_in = f"which had its gradients last in {last[rank]} of {count} steps"
        yield "wait", f"waiting for rank {rank}, {last_in}", by_rank
    yield "communication", "all-reduce, as far as it is waited for", reducing
    for name, by_rank in operations.items():
        yield "operation", name, by_rank
    is_measured = any(waits.values()) or len(recordings) == 1
    what = "the rest of the steps: Python, and what starts operations"
    yield "other", what if is_measured else f"{what}, and waiting for other workers", rest


Event = dict[str, Any]

_LOOP, _STEPS, _THREADS = 0, 1, 2  # places of the tracks of a worker
_TRACKS = 1_000_000  # places of a process


def build_trace(recordings: Sequence[Recording]) -> Event:
    """Return the trace of all workers: each is a process, and Horovod's timeline is one after them."""
    begin_ns = min(recording.common(recording.begin_ns) for recording in recordings)
    end_ns = max(recording.common(recording.end_ns) for recording in recordings)
    events: list[Event] = []
    waits = waits_by_rank(recordings)
    for recording in recordings:
        rank, common = recording.rank, recording.common
        events += _named("process", rank, 0, f"rank {rank} on {recording.host}")
        for place, name in enumerate(["training loop", "step", *recording.operations.threads]):
            events += _named("thread", rank, place, name)
        for phase in recording.phases:
            at_ns, length_ns = common(phase.begin_ns) - begin_ns, phase.end_ns - phase.begin_ns
            events.append(_span((rank, _LOOP), phase.name, at_ns, length_ns, phase.step))
        for span in recording.operations.spans:
            at_ns, track = common(span.begin_ns) - begin_ns, (rank, _THREADS + span.thread)
            events.append(_span(track, span.name, at_ns, span.end_ns - span.begin_ns) | {"cat": span.kind})
        for wait in waits.get(rank, []):
            for name, begin, end in (
                ("own part of the step", wait.begin_ns, wait.ready_ns),
                (f"waiting for rank {wait.last_rank}", wait.ready_ns, wait.all_ready_ns),
                ("all-reduce", wait.all_ready_ns, wait.reduced_ns),
            ):
                if end > begin:
                    events.append(_span((rank, _STEPS), name, begin - begin_ns, end - begin, wait.step))
    process = max(recording.rank for recording in recordings) + 1
    events += _of_horovod(recordings[0].timeline, process, begin_ns, end_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_horovod(timeline: Iterable[Event], process: int, begin_ns: int, end_ns: int) -> Iterator[Event]:
    """Yield what the timeline has between two times: in it each tensor is a process, here a track."""
    epoch_us, places = 0, dict[int, int]()
    open_spans: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in timeline:
        kind, tensor, arguments = event.get("ph"), event.get("pid", 0), event.get("args", {})
        if kind == "M" and event["name"] == "process_name":
            epoch_us = arguments.get("start_time_since_epoch_in_micros", epoch_us)
            if "name" in arguments and tensor not in places:
                if not places:
                    yield from _named("process", process, 0, "Horovod, as rank 0 coordinates it")
                places[tensor] = len(places)
                yield from _named("thread", process, places[tensor], arguments["name"])
        elif kind == "B":
            open_spans[tensor].append((event["name"], 1000 * (epoch_us + event["ts"])))
        elif kind == "E" and open_spans[tensor]:
            (name, since_ns), at_ns = open_spans[tensor].pop(), 1000 * (epoch_us + event["ts"])
            if tensor in places and at_ns >= begin_ns and since_ns <= end_ns:
                yield _span((process, places[tensor]), name, since_ns - begin_ns, at_ns - since_ns)


def _named(what: str, process: int, place: int, name: str) -> Iterator[Event]:
    """Yield the name of a process or a thread, and its place among the others."""
    fields = {"ph": "M", **_track(process, place)}
    index = process if what == "process" else place
    yield {**fields, "name": f"{what}_name", "args": {"name": name}}
    yield {**fields, "name": f"{what}_sort_index", "args": {"sort_index": index}}


def _track(process: int, place: int) -> Event:
    """Return the numbers of a track of a rank, or of the number after them for Horovod.

    Viewers take 0 for the idle task, and may take one number of a thread in two processes for one thread.
    """
    return {"pid": process + 1, "tid": _TRACKS * (process + 1) + place}


def _span(track: tuple[int, int], name: str, at_ns: int, length_ns: int, step: int = 0) -> Event:
    times = {"ts": at_ns / 1e3, "dur": max(0, length_ns) / 1e3}
    return {"ph": "X", **_track(*track), "name": name, **times, **({"args": {"step": step}} if step else {})}
