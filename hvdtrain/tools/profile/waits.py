"""How long workers wait for one another in a step, from the marks of all of them on one clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdtrain.tools.profile.clocks import to_common
from hvdtrain.tools.profile.recording import Recording
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
