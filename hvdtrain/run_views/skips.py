"""Where samples could not be read and were skipped, from the log of a run."""

from typing import NamedTuple

import numpy as np

from hvdtrain.metric_names import BAD_SAMPLES
from hvdtrain.reporting.records import EVAL, TRAIN
from hvdtrain.run_views.curves import RunLog
from hvdtrain.run_views.run_event import RunEvent
from hvdtrain.storage.text import counted

_MOST = 20  # ranges of steps, or of evaluations, that are listed one by one
_LARGEST = 2**53


class _Range(NamedTuple):
    """Records next to one another in all of which samples were skipped.

    Attributes:
        first: the first step of the first record.
        last: the step of the last record.
        samples: how many were skipped.
        records: the number of records.
    """

    first: int
    last: int
    samples: int
    records: int

    def with_range(self, other: "_Range") -> "_Range":
        """Return this range and a later one as one."""
        return _Range(self.first, other.last, self.samples + other.samples, self.records + other.records)


def skips_in(log: RunLog) -> list[tuple[int, RunEvent]]:
    """Return where samples were skipped, with the steps to sort by: windows and evaluations."""
    events = []
    for phase in (TRAIN, EVAL):
        found = _ranges(log, phase)
        rest = found[_MOST - 1 :] if len(found) > _MOST else []
        shown = found[: -len(rest)] if rest else found
        texts = [(one.last, _text(phase, one)) for one in shown]
        if rest:
            joined = rest[0]
            for one in rest[1:]:
                joined = joined.with_range(one)
            texts.append((joined.last, f"{_text(phase, joined)} ({len(rest):,} separate ranges of steps)"))
        events += [(step, RunEvent("problem", text, log.place_of(step))) for step, text in texts]
    return events


def _ranges(log: RunLog, phase: str) -> list[_Range]:
    curve = log.curves.get((phase, BAD_SAMPLES))
    if curve is None:
        return []
    steps = log.axes_of(phase)["step"]
    found: list[_Range] = []
    last_place = -1
    for step, value in zip(curve.axes["step"], curve.values, strict=True):
        if not 0 < value < _LARGEST:
            continue
        place = int(np.searchsorted(steps, step))
        begins = int(steps[place - 1]) + 1 if place else 1
        one = _Range(begins if phase == TRAIN else int(step), int(step), int(value), 1)
        if found and place == last_place + 1:
            found[-1] = found[-1].with_range(one)
        else:
            found.append(one)
        last_place = place
    return found


def _text(phase: str, of: _Range) -> str:
    """Return what was skipped, and where, in words."""
    skipped = f"{counted(of.samples, 'sample')} could not be read and {'was' if of.samples == 1 else 'were'}"
    steps = f"steps {of.first:,} to {of.last:,}"
    if phase == TRAIN:
        return f"{skipped} skipped in {steps if of.first < of.last else f'step {of.last:,}'}"
    if of.records == 1:
        return f"{skipped} left out of the evaluation at step {of.last:,}"
    return f"{skipped} left out, added up over {of.records:,} evaluations at {steps}"
