"""How a run ended."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hvdtrain.reporting.records import parse_lines
from hvdtrain.wire_types import travels


@travels
@dataclass(frozen=True)
class Best:
    """The best value of an evaluation metric over a run.

    Attributes:
        value: the value.
        step: the step of the evaluation; the first of those with this value.
        checkpoint: the directory of the checkpoint of that step; None if it was not kept.
    """

    value: float
    step: int
    checkpoint: str | None = None


@travels
@dataclass(frozen=True)
class Summary:
    """How a run ended; what summary.json holds.

    Attributes:
        status: "completed", "stopped", "failed"; "unsaved" in place of the first two if the state is not
            saved as it should be.
        framework: "torch" or "tf".
        task: the task's name or path.
        workers: number of workers.
        steps: steps done.
        samples: samples seen.
        epochs: passes over the training data.
        seconds: from the first step to the end.
        samples_per_second: throughput of all workers together, the median of the logged windows.
        peak_memory_mib: the most memory that a worker's process has had, in MiB, the largest over the
            workers; of rank 0 until the end of the run, of others until the end of training.
        peak_device_memory_mib: likewise, what tensors have had on a worker's GPU; 0 on the CPU.
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
        best: the best value of each evaluation metric in ``history``, by the metric's name; empty unless
            ``hvdtrain.train`` returned it. Lower is better for names that end in loss, error, mae, mse, rmse,
            perplexity or distance, higher for others, unless ``keep_best``, ``early_stopping`` or
            ``plateau_metric`` says otherwise.
        metrics_log: what ``metrics.jsonl`` of the run directory holds; likewise.
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
    peak_memory_mib: float = 0.0
    peak_device_memory_mib: float = 0.0
    best: dict[str, Best] = field(default_factory=dict)
    metrics_log: bytes = field(default=b"", repr=False)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, in order, with NaN where a number is not finite.

        They are windows of training (``phase`` "train"), evaluations ("eval"), what callbacks logged and
        changes of the workers, also from before the run was resumed in its directory. Only what
        ``hvdtrain.train`` returns has them, the same on every worker.
        """
        return parse_lines(self.metrics_log.splitlines())

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values; what is not so in every run, such as an error, only where it is.

        Without ``best`` and ``metrics_log``, which metrics.jsonl has.
        """
        rare = (
            *("error", "bad_samples", "failed_saves", "save_error", "stopped_early", "eval_sets"),
            *("changes", "paused_seconds", "peak_memory_mib", "peak_device_memory_mib"),
        )
        left_out = ("best", "metrics_log")
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        return {name: value for name, value in values.items() if name not in rare or value}
