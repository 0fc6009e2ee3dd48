"""When things happen and how large a step is: pure functions of progress.

Progress is counted in samples; an epoch is one pass over the training data, so "epoch 2.5" is
two and a half times its size, at any batch size and any number of workers.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

# a step of a deep model has ten thousand operations, of each of which a profiler keeps up to 1.5 KB in memory
_MOST_STEPS = 100
_STEPS = re.compile(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?")


@dataclass(frozen=True)
class StepWindow:
    """Some steps in a row."""

    first: int  # the first step, from 1
    last: int  # the last step

    @classmethod
    def parse(cls, value: object) -> "StepWindow":
        """Read ``"20-24"``, ``20`` or ``"20"``."""
        # A colon is not taken: YAML reads 20:24 as a number to the base 60.
        if isinstance(value, StepWindow):
            return value
        match = _STEPS.fullmatch(str(value).strip())
        if match is None:
            raise ValueError("must be steps such as 20-24, or one step such as 20")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1:
            raise ValueError("the first step must be 1 or later")
        if last < first:
            raise ValueError("the last step must not be before the first")
        if last - first >= _MOST_STEPS:
            raise ValueError(f"must be at most {_MOST_STEPS:,} steps")
        return cls(first, last)

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def describe(self) -> str:
        """Return it as text: "step 20", "steps 20 to 24"."""
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


_MAX_DIGITS = 100
_EPOCHS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*epochs?")


@dataclass(frozen=True)
class Cadence:
    """How often something is due: every so many steps, or every so many epochs."""

    every: float  # the interval, greater than 0; a whole number if the unit is steps
    unit: str = "steps"  # "steps" or "epochs"

    @classmethod
    def parse(cls, value: object) -> "Cadence":
        """Read ``10``, ``"10"``, ``"2epochs"`` or ``"0.5 epoch"``."""
        if isinstance(value, Cadence):
            return value
        text = str(value).strip()
        if match := _EPOCHS.fullmatch(text):
            every, unit = float(match[1]), "epochs"
        elif text.isdecimal() and len(text) <= _MAX_DIGITS:
            every, unit = int(text), "steps"
        else:
            raise ValueError("must be a number of steps such as 10, or epochs such as 0.5epoch")
        if every <= 0:
            raise ValueError("must be greater than 0")
        if every == math.inf:
            raise ValueError("must be finite")
        return cls(every, unit)

    def due(self, step: int, samples_before: int, samples_after: int, data_size: int, steps: int = 1) -> bool:
        """Return whether it is due after a step, or after several that count as one."""
        # An epoch interval is due at the first step at or past its boundary; so is an interval of steps if
        # several steps count as one.
        if self.unit == "steps":
            return step // int(self.every) > (step - steps) // int(self.every)
        epochs, per = self._ratio
        interval = epochs * data_size
        return samples_after * per // interval > samples_before * per // interval

    @cached_property
    def _ratio(self) -> tuple[int, int]:
        """The interval as two whole numbers: 3 x 0.1 epochs is 0.3, and no data set is too large for it."""
        return Fraction(str(self.every)).as_integer_ratio()

    def __str__(self) -> str:
        if self.unit == "steps":
            return str(int(self.every))
        return f"{Decimal(str(self.every)).normalize():f}epoch"

    def describe(self) -> str:
        """Return it as text: "every 10 steps", "every epoch"."""
        if self.every == 1:
            return f"every {self.unit.removesuffix('s')}"
        return f"every {f'{self.every:g}' if self.unit == 'epochs' else int(self.every)} {self.unit}"


class TrainingProgress(NamedTuple):
    """Where training stands, as a task's ``learning_rate_factor`` is given it."""

    epoch: float  # passes over the training data so far, such as 2.5
    epochs: float  # those of the whole training

    @property
    def fraction(self) -> float:
        """The part of the training that is done, from 0 to 1."""
        return min(self.epoch / self.epochs, 1.0)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of progress: a linear warm-up from 0 to ``peak``, then a schedule.

    linear, cosine and one_cycle end at ``total_epochs``; cyclic and cosine_restarts start at the top of
    each cycle. Sources: cosine and cosine_restarts Loshchilov and Hutter 2017 (arXiv:1608.03983), cyclic
    Smith 2017 (arXiv:1506.01186), inverse_sqrt Vaswani et al. 2017 (arXiv:1706.03762). one_cycle, from the
    beginning, has the numbers of torch.optim.lr_scheduler.OneCycleLR (arXiv:1708.07120); the momentum does
    not change.
    """

    peak: float  # learning rate at the end of the warm-up
    schedule: str  # the name of one of those
    total_epochs: float  # length of the whole training
    warmup_epochs: float = 0.0  # length of the warm-up; 0 for none
    # lowest learning rate of linear, cosine, cosine_restarts, cyclic and plateau, as a fraction of peak
    final_fraction: float = 0.0
    step_epochs: tuple[float, ...] = ()  # boundaries of step, in epochs since the start
    step_factor: float = 0.1  # what step multiplies by at each boundary
    cycle_epochs: float = 1.0  # length of one cycle of cyclic and cosine_restarts, in epochs
    factor: Callable[[TrainingProgress], float] | None = None  # of the schedule task

    def at(self, epoch: float, plateau_fraction: float = 1.0) -> float:
        """Return the learning rate at a point of the training."""
        lowered = max(plateau_fraction, self.final_fraction) if self.schedule == "plateau" else 1.0
        if self.schedule == "task" and self.factor is not None:
            lowered = self.factor(TrainingProgress(epoch, self.total_epochs))
        if epoch < self.warmup_epochs:
            return self.peak * epoch / self.warmup_epochs * lowered
        return self.peak * self._decay(epoch) * lowered

    def _decay(self, epoch: float) -> float:
        since_warmup = epoch - self.warmup_epochs
        if self.schedule == "one_cycle":
            part = min(epoch / self.total_epochs, 1.0)
            if part < _ONE_CYCLE_RISE:
                return 1 + (ONE_CYCLE_FIRST - 1) * _half_cosine(part / _ONE_CYCLE_RISE)
            fall = _half_cosine((part - _ONE_CYCLE_RISE) / (1 - _ONE_CYCLE_RISE))
            return ONE_CYCLE_LAST + (1 - ONE_CYCLE_LAST) * fall
        if self.schedule == "step":
            return float(self.step_factor ** sum(epoch >= boundary for boundary in self.step_epochs))
        if self.schedule == "inverse_sqrt":
            return math.sqrt(self.warmup_epochs / max(epoch, 1e-12))
        if self.schedule in ("linear", "cosine"):
            part = min(since_warmup / max(self.total_epochs - self.warmup_epochs, 1e-12), 1.0)
        elif self.schedule in ("cyclic", "cosine_restarts"):
            part = since_warmup / self.cycle_epochs % 1.0
        else:
            return 1.0
        straight = {"linear": 1 - part, "cyclic": abs(1 - 2 * part)}
        height = straight.get(self.schedule, _half_cosine(part))
        return self.final_fraction + (1 - self.final_fraction) * height


# of one_cycle, as fractions of the peak: where it begins, where it ends, and the part that goes up
ONE_CYCLE_FIRST = 1 / 25
ONE_CYCLE_LAST = ONE_CYCLE_FIRST / 1e4
_ONE_CYCLE_RISE = 0.3


def _half_cosine(part: float) -> float:
    """Return half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * part))
