"""How a run ended."""

from dataclasses import asdict, dataclass, field
from typing import Any

from hvdtrain.wire_types import travels


@travels
@dataclass(frozen=True)
class Summary:
    """How a run ended; what summary.json holds.

    Attributes:
        status: "completed", "stopped" or "failed".
        framework: "torch" or "tf".
        task: the task's name or path.
        workers: number of workers.
        steps: steps done.
        samples: samples seen.
        epochs: passes over the training data.
        seconds: from the first step to the end.
        samples_per_second: throughput of all workers together, the median of the logged windows.
        final: metrics of the last evaluation.
        run_dir: the run directory.
        checkpoint: the newest checkpoint that verifies; None where there is none.
        bad_samples: how often a sample could not be read and was skipped.
        failed_saves: how many checkpoints could not be written.
        save_error: why, the last time.
        error: what went wrong, if something did.
        stopped_early: why training ended before its length, where early stopping ended it.
        eval_sets: names of the sets of evaluation data, the one whose metrics have plain names first; empty
            where the data have no names.
        changes: how often the workers of an elastic job changed while it trained.
        paused_seconds: the time without training that this took.
    """

    status: str
    framework: str
    task: str
    workers: int
    steps: int
    samples: int
    epochs: float
    seconds: float
    samples_per_second: float
    final: dict[str, float]
    run_dir: str
    checkpoint: str | None = None
    bad_samples: int = 0
    failed_saves: int = 0
    save_error: str | None = None
    error: str | None = None
    stopped_early: str | None = None
    eval_sets: list[str] = field(default_factory=list)
    changes: int = 0
    paused_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values; what is not so in every run, such as an error, only where it is."""
        rare = (
            *("error", "bad_samples", "failed_saves", "save_error", "stopped_early", "eval_sets"),
            *("changes", "paused_seconds"),
        )
        return {name: value for name, value in asdict(self).items() if name not in rare or value}
