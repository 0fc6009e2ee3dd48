"""What the recorded steps cost: shares of the workers' time, in words."""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.backends.recording import KERNEL, MESSAGES, OPERATION, Operation
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.tools.profile.trace import Timeline, last_ranks, waits_by_rank
from hvdtrain.workers.activity import EVALUATING, READING_DATA, SAVING, TRAINING

_COLLECTIVE = "Horovod"  # operations that wait for other workers are counted as communication


def self_seconds(recording: Recording) -> dict[str, float]:
    """Return the seconds of each operation of a worker in its steps, by name.

    Of a device it is the time of its work. On the host it is the operation's own time, without that of
    operations which it called in the same thread.
    """
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


_GRADIENTS = re.compile(r"(?:^|[./])hvdtrain\.gradients?\.")
_BFLOAT16 = re.compile(r"(?:^|[./])hvdtrain\.bf16(?:$|\.)")
_PREFIX = "allreduce."  # PyTorch's, of all names


def describe_message(tensor: str, timeline: Timeline, messages: Mapping[str, tuple[str, str]]) -> str:
    """Return what a tensor of the timeline is, and its bytes.

    Horovod has a name for each message: that of many gradients which travel together tells of one of them.

    Args:
        tensor: its name in the timeline.
        timeline: the timeline.
        messages: the first and the last parameter of messages of gradients, by name.
    """
    size = timeline.size_of(tensor)
    what = _what(tensor, timeline, messages)
    return f"{what}, {_words_for_bytes(size)}" if size else what


def _what(tensor: str, timeline: Timeline, messages: Mapping[str, tuple[str, str]]) -> str:
    if _BFLOAT16.search(tensor):
        return "gradients as bf16"
    if not _GRADIENTS.search(tensor):
        return tensor
    others = {span.tensor for span in timeline.spans if _GRADIENTS.search(span.tensor)} - {tensor}
    if not others:
        return "all gradients, which travel together"
    ends = messages.get(tensor.removeprefix(_PREFIX))
    if ends is None:
        return f"gradients ({tensor})"
    first, last = ends
    return f"the gradient of {first}" if first == last else f"the gradients from {first} to {last}"


def _words_for_bytes(size: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} B"


SHOWN = 5
_STANDS_OUT = 1.5  # times the mean of the workers
_LEAST_SHARE = 0.005
_KEPT = 100  # costs in the file


@dataclass(frozen=True)
class Cost:
    """What takes a share of the workers' time.

    Attributes:
        kind: "data", "wait", "communication", "operation", "other".
        what: the cost in words.
        seconds: the mean over the workers, in all recorded steps.
        share: of the recorded time.
    """

    kind: str
    what: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Costs:
    """What the recorded steps cost.

    Attributes:
        steps: the steps that were recorded.
        workers: the number of workers whose recordings there are.
        seconds: the recorded time, the mean over the workers.
        costs: the largest first. They do not overlap, and their shares add up to 1.
        ready_last: in how many steps each rank was the last to have its gradients; where that was not
            measured, how often Horovod's timeline noted it as the last that was ready to reduce a tensor.
        longest_tensors: the seconds of the operations that took longest in Horovod's timeline, by tensor;
            they overlap with other costs.
        longest: the first of them in words; empty if there is none.
        clock_uncertainty_ms: how far times of workers on different hosts are from one another at most.
        problems: what could not be recorded, in words.
        between: evaluations and saves that lie between the steps, in words, with their seconds, the mean over
            the workers.
    """

    steps: list[int]
    workers: int
    seconds: float
    costs: list[Cost]
    ready_last: dict[int, int] = field(default_factory=dict)
    longest_tensors: dict[str, float] = field(default_factory=dict)
    longest: str = ""
    clock_uncertainty_ms: float = 0.0
    problems: list[str] = field(default_factory=list)
    between: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the largest costs in words, one a line."""
        shown = [cost for cost in self.costs if cost.share >= _LEAST_SHARE][:SHOWN]
        per_step = len(self.steps) or 1
        return [
            f"{cost.share:4.0%}  {cost.what}, {1e3 * cost.seconds / per_step:.3g} ms a step" for cost in shown
        ]

    def between_line(self) -> str:
        """Return which evaluations and saves the recorded time has in it, in words; empty if none."""
        if not self.between or not self.steps:
            return ""
        left_ms = 1e3 * (self.seconds - sum(self.between.values())) / len(self.steps)
        return f"in it: {' and '.join(self.between)}; without, {left_ms:.3g} ms each"

    def values(self) -> dict[str, Any]:
        """Return what ``costs.json`` holds."""
        per_step = len(self.steps) or 1
        return {
            "steps": self.steps,
            "workers": self.workers,
            "seconds": self.seconds,
            "step_ms": 1e3 * self.seconds / per_step,
            "costs": [
                {
                    "kind": cost.kind,
                    "what": cost.what,
                    "share": round(cost.share, 6),
                    "ms_per_step": 1e3 * cost.seconds / per_step,
                }
                for cost in self._kept()
            ],
            "between_steps_ms": {what: 1e3 * seconds for what, seconds in self.between.items()},
            "ready_last": {str(rank): count for rank, count in self.ready_last.items()},
            "longest_tensors_ms_per_step": {
                tensor: 1e3 * seconds / per_step for tensor, seconds in self.longest_tensors.items()
            },
            "longest_in_horovod": self.longest,
            "clock_uncertainty_ms": self.clock_uncertainty_ms,
            "problems": self.problems,
        }

    def _kept(self) -> list[Cost]:
        """Return the costs of the file: the largest, and the others as one."""
        kept, others = self.costs[:_KEPT], self.costs[_KEPT:]
        if not others:
            return kept
        seconds, share = sum(cost.seconds for cost in others), sum(cost.share for cost in others)
        return [*kept, Cost("other", f"the {len(others):,} smallest of these costs", seconds, share)]


def find_costs(recordings: Sequence[Recording], timeline: Timeline) -> Costs:
    """Return what the recorded steps cost.

    Args:
        recordings: those of the workers, in the order of ranks.
        timeline: Horovod's timeline between their beginning and end.
    """
    seconds = statistics.fmean((r.end_ns - r.begin_ns) / 1e9 for r in recordings)
    steps = sorted({step for recording in recordings for step in recording.steps})
    found: dict[tuple[str, str], list[float]] = {}
    for kind, what, by_rank in (*_phases(recordings), *_in_steps(recordings), _listening(recordings)):
        if any(by_rank):
            found[kind, _with_rank(what, by_rank, recordings)] = by_rank
    costs = [
        Cost(kind, what, statistics.fmean(by_rank), statistics.fmean(by_rank) / seconds if seconds else 0.0)
        for (kind, what), by_rank in found.items()
    ]
    waits = waits_by_rank(recordings)
    tensors = dict(list(timeline.seconds_by_tensor().items())[:SHOWN])
    return Costs(
        steps=steps,
        workers=len(recordings),
        seconds=seconds,
        costs=sorted(costs, key=lambda cost: -cost.seconds),
        ready_last=last_ranks(waits) if any(waits.values()) else timeline.last_ready(),
        longest_tensors=tensors,
        longest=describe_message(next(iter(tensors)), timeline, MESSAGES) if tensors else "",
        clock_uncertainty_ms=max(max(r.before.uncertainty_ns, r.after.uncertainty_ns) for r in recordings)
        / 1e6,
        problems=[problem for recording in recordings for problem in recording.problems],
        between=_between(recordings),
    )


CostByRank = tuple[str, str, list[float]]


def _phases(recordings: Sequence[Recording]) -> list[CostByRank]:
    """Return what the training thread did apart from steps."""
    names = list(dict.fromkeys(phase.name for recording in recordings for phase in recording.phases))
    costs = []
    for name in names:
        if name == TRAINING:
            continue
        by_rank = [
            sum(p.end_ns - p.begin_ns for p in recording.phases if p.name == name) / 1e9
            for recording in recordings
        ]
        if name == READING_DATA:
            costs.append(("data", "waiting for data", by_rank))
        else:
            costs.append(("other", name.removesuffix(" after step"), by_rank))
    return costs


def _listening(recordings: Sequence[Recording]) -> CostByRank:
    """Return the time between what the training thread did, in which the recording itself notes it."""
    by_rank = [
        max(0, r.end_ns - r.begin_ns - sum(p.end_ns - p.begin_ns for p in r.phases)) / 1e9 for r in recordings
    ]
    return "other", "the recording itself, which notes what begins and ends", by_rank


def _between(recordings: Sequence[Recording]) -> dict[str, float]:
    """Return the evaluations and saves between the recorded steps, in words, and their seconds."""
    seconds: dict[str, float] = {}
    for name, what in ((EVALUATING, "the evaluation"), (SAVING, "the save")):
        found = [p for recording in recordings for p in recording.phases if p.name == name]
        if not found:
            continue
        steps = sorted({phase.step for phase in found})
        after = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {', '.join(f'{s:,}' for s in steps)}"
        total = sum(phase.end_ns - phase.begin_ns for phase in found) / 1e9
        seconds[f"{what if len(steps) == 1 else f'{what}s'} after {after}"] = total / len(recordings)
    return seconds


def _in_steps(recordings: Sequence[Recording]) -> list[CostByRank]:
    """Return what the time in steps consists of: waiting, reducing, operations, and the rest."""
    waits = waits_by_rank(recordings)
    last, count = last_ranks(waits), len(next(iter(waits.values()), ()))
    waiting = {rank: [0.0] * len(recordings) for rank in last}
    reducing, rest = [0.0] * len(recordings), [0.0] * len(recordings)
    operations: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(recordings))
    for place, recording in enumerate(recordings):
        in_steps = sum(p.end_ns - p.begin_ns for p in recording.phases if p.name == TRAINING) / 1e9
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
    costs: list[CostByRank] = [
        ("wait", f"waiting for rank {rank}, which had its gradients last in {last[rank]} of {count} steps", s)
        for rank, s in waiting.items()
    ]
    costs.append(("communication", "all-reduce, as far as it is waited for", reducing))
    costs += [("operation", name, by_rank) for name, by_rank in operations.items()]
    is_measured = any(waits.values()) or len(recordings) == 1
    what = "the rest of the steps: Python, and what starts operations"
    costs.append(("other", what if is_measured else f"{what}, and waiting for other workers", rest))
    return costs


def _with_rank(what: str, by_rank: Sequence[float], recordings: Sequence[Recording]) -> str:
    """Return a cost in words, with the worker that has much more of it than the others."""
    most, mean = max(by_rank), statistics.fmean(by_rank)
    if len(by_rank) < 2 or most < _STANDS_OUT * mean or what.startswith("waiting for rank"):
        return what
    return f"{what} (most on rank {recordings[list(by_rank).index(most)].rank})"


def longest_tensor(costs: Costs) -> str:
    """Return what took longest in Horovod, in words; empty if the timeline has nothing."""
    for seconds in costs.longest_tensors.values():
        return f"{costs.longest}, {1e3 * seconds / (len(costs.steps) or 1):.3g} ms a step"
    return ""
