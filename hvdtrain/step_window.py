"""Some steps in a row: which steps a job records."""

import re
from dataclasses import dataclass

# a step of a deep model has ten thousand operations, of each of which a profiler keeps up to 1.5 KB in memory
_MOST_STEPS = 100
_STEPS = re.compile(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?")


@dataclass(frozen=True)
class StepWindow:
    """Some steps in a row.

    Args:
        first: the first step, from 1.
        last: the last step.
    """

    first: int
    last: int

    @classmethod
    def parse(cls, value: object) -> "StepWindow":
        """Read ``"20-24"``, ``20`` or ``"20"``.

        A colon is not taken: YAML reads 20:24 as a number to the base 60.

        Raises:
            ValueError: saying the rule.
        """
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
        """Return it in words: "step 20", "steps 20 to 24"."""
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"
