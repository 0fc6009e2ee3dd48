"""What was measured of hvdtrain and another program that does the same work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.bench.result import VERSION, told
from hvdtrain.bench.spread import Spread
from hvdtrain.words import counted

_LEAST_PAIRS = 3  # for a verdict
TITLES = {
    "ddp": "PyTorch's DistributedDataParallel",
    "mwms": "TensorFlow's MultiWorkerMirroredStrategy",
    "plain": "a plain loop",
    "horovod": "Horovod's own optimizer",
}


@dataclass(frozen=True)
class Comparison:
    """What was measured of both programs.

    Attributes:
        against: the other program.
        workers: number of workers of each.
        own: what hvdtrain's jobs found, in order.
        others: what the other program found each time.
    """

    against: str
    workers: int
    own: Sequence[dict[str, Any]]
    others: Sequence[dict[str, Any]]

    @property
    def ratio(self) -> Spread:
        """Hvdtrain's step relative to the other program's, of each pair."""
        return Spread.of_ratios(_steps(self.own), _steps(self.others))

    def describe(self) -> str:
        """Return it as the text that is shown."""
        first = self.own[0]
        title = f"against {TITLES[self.against]}: {first['task']} with {first['device']}, "
        title += counted(self.workers, "worker")
        title += f" over {first['controller']}" if self.workers > 1 else ""
        warnings = self._warnings()
        found = verdict(self.ratio, len(self.own)) + (", but see the warnings" if warnings else "")
        rows = [
            ("hvdtrain", f"{Spread.of(_steps(self.own)).times(1e3).describe()} ms a step"),
            (self.against, f"{Spread.of(_steps(self.others)).times(1e3).describe()} ms a step"),
            ("ratio", f"{self.ratio.describe()} of {len(self.own)} pairs; {found}"),
            ("same work", f"the first loss is {first['first_loss']:.6g} in both"),
        ]
        lines = [title, *(f"  {name:<9}  {text}" for name, text in rows)]
        lines += [f"  note: {text}" for text in told(self.own, "notes")]
        return "\n".join([*lines, *(f"  warning: {text}" for text in warnings)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document; times are in seconds."""
        return {
            "version": VERSION,
            "against": self.against,
            "workers": self.workers,
            "ratio": self.ratio.to_dict(),
            "hvdtrain_step_seconds": Spread.of(_steps(self.own)).to_dict(),
            "other_step_seconds": Spread.of(_steps(self.others)).to_dict(),
            "hvdtrain": list(self.own),
            "other": list(self.others),
        }

    def _warnings(self) -> list[str]:
        """Return the first warning of each program, and how many of its runs have one."""
        found = []
        for name, documents in (("hvdtrain", self.own), (self.against, self.others)):
            warned = [document["warnings"][0] for document in documents if document.get("warnings")]
            if warned:
                found.append(f"{name}, {len(warned)} of {len(documents)} runs: {warned[0]}")
        return found


def _steps(documents: Sequence[dict[str, Any]]) -> list[float]:
    return [document["chunk_seconds"]["median"] for document in documents]


def verdict(ratio: Spread, pairs: int) -> str:
    """Return what a ratio means, in words."""
    if pairs < _LEAST_PAIRS:
        return f"fewer than {_LEAST_PAIRS} pairs do not tell the spread"
    if ratio.low <= 1 <= ratio.high:
        return "no difference beyond the spread"
    return "hvdtrain is faster" if ratio.high < 1 else "hvdtrain is slower"
