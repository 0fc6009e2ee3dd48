"""What ``bench`` has measured of a job: as a JSON document, and in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.measure import Steps
from hvdtrain.tools.bench.message_times import MessageTime, words_for_size
from hvdtrain.tools.bench.spread import Spread

VERSION = 2  # of the document
_PARTS = {
    "data": "waiting for data",
    "compute": "computing",
    "slowest": "waiting for the slowest worker",
    "communication": "exposed communication",
}


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        task: the task.
        device: framework, version and device, in words.
        workers: number of workers.
        hosts: number of hosts.
        controller: "MPI", "Gloo" or "none".
        global_batch: samples of a step.
        reduction: how gradients are reduced, in words.
        steps: how long steps take.
        messages: how long sums take, by size.
        warnings: why figures may be wrong.
        notes: what else the user should know.
        threads: compute threads of a worker; 0 if it is not known.
    """

    task: str
    device: str
    workers: int
    hosts: int
    controller: str
    global_batch: int
    reduction: str
    steps: Steps
    messages: Sequence[MessageTime] = ()
    warnings: Sequence[str] = field(default=())
    notes: Sequence[str] = field(default=())
    threads: int = 0

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document; times are in seconds, sizes in bytes."""
        return {
            "version": VERSION,
            "task": self.task,
            "device": self.device,
            "workers": self.workers,
            "hosts": self.hosts,
            "controller": self.controller,
            "global_batch": self.global_batch,
            "threads": self.threads,
            "reduction": self.reduction,
            "steps_timed": self.steps.steps,
            "first_loss": self.steps.first_loss,
            "step_seconds": self.steps.step_seconds.to_dict(),
            "mean_step_seconds": Spread.of(self.steps.blocks).to_dict(),
            "chunk_seconds": self.steps.chunk_seconds.to_dict(),
            "samples_per_second": self.steps.samples_per_second.to_dict(),
            "part_seconds": {name: part.to_dict() for name, part in self.steps.parts.items()},
            "all_reduce": [
                {"bytes": one.size, "horovod_seconds": one.seconds.to_dict()} for one in self.messages
            ],
            "warnings": self._all_warnings(),
            "notes": list(self.notes),
        }

    def describe(self) -> str:
        """Return it as the text that rank 0 shows."""
        count = counted(self.workers, "worker")
        over = f" over {self.controller}" if self.workers > 1 else ""
        lines = [
            f"bench: {self.task} with {self.device}, {count}{over}, {self.global_batch:,} samples a step"
        ]
        rows = [
            ("speed", f"{self.steps.samples_per_second.describe(0)} samples/s"),
            ("step", f"{_in_ms(self.steps.step_seconds)}, {self.steps.steps:,} steps timed"),
            *self._part_rows(),
        ]
        if self.threads:
            rows.append(("threads", f"{self.threads} for each worker's computation"))
        if self.workers > 1:
            rows.append(("gradients", self.reduction))
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
        lines += _message_table(self.messages)
        lines += [f"  note: {text}" for text in self.notes]
        lines += [f"  warning: {text}" for text in self._all_warnings()]
        return "\n".join(lines)

    def _all_warnings(self) -> list[str]:
        """Return why figures may be wrong, parts that cannot be included."""
        mean = Spread.of(self.steps.blocks).median
        wrong = [_PARTS[name] for name, part in self.steps.parts.items() if not _can_be(part.median / mean)]
        if not wrong:
            return list(self.warnings)
        return [
            *self.warnings,
            f"{' and '.join(wrong)} cannot be more than all of a step or less than nothing: steps with the "
            "other workers and without them were not disturbed alike, so the parts are not trustworthy; "
            "measure again on an idle machine, or with more --seconds",
        ]

    def _part_rows(self) -> list[tuple[str, str]]:
        """Return the mean step and its parts, which add up to it; nothing if they were not measured."""
        if not self.steps.parts:
            return []
        mean = Spread.of(self.steps.blocks)
        parts = list(self.steps.parts.items())
        if self.workers == 1:  # which waits for nobody
            parts = [(name, part) for name, part in parts if (part.low, part.high) != (0, 0)]
        rows = [("mean step", f"{_in_ms(mean)}, of which")]
        return rows + [(f"  {_PARTS[name]}", _part(part, mean.median)) for name, part in parts]


def told(documents: Iterable[dict[str, Any]], kind: str) -> list[str]:
    """Return what the documents of jobs tell, each text once.

    Args:
        documents: the documents.
        kind: "notes" or "warnings".
    """
    return list(dict.fromkeys(text for document in documents for text in document.get(kind, ())))


def _in_ms(seconds: Spread) -> str:
    return f"{seconds.times(1e3).describe()} ms"


def _part(part: Spread, mean_seconds: float) -> str:
    is_nothing = part.low == part.high == 0
    noise = "; not above the noise" if part.low <= 0 and not is_nothing else ""
    share = part.median / mean_seconds
    doubt = "" if _can_be(share) else "; not trustworthy"
    return f"{_in_ms(part)}, {share:.0%} of it{noise}{doubt}"


def _can_be(share: float) -> bool:
    """Return whether a part can have this share of a step, as it is shown in whole percents."""
    return 0 <= round(100 * share) <= 100


def _message_table(messages: Sequence[MessageTime]) -> list[str]:
    lines = [f"  all-reduce{'':>5}{'time':>12}{'rate':>14}"] if messages else []
    for one in messages:
        row = f"    {words_for_size(one.size):>8}  {one.seconds.median * 1e6:>10,.0f} us"
        lines.append(f"{row}  {one.size / one.seconds.median / 1e6:>7,.0f} MB/s")
    return lines
