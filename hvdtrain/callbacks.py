"""Callbacks: a user's code that a run calls at its steps, evaluations and checkpoints.

A callback is any object with some of the methods of :class:`Callback`, which it may inherit from. A task
supplies callbacks as ``callbacks``, a script as ``hvdtrain.train(callbacks=[...])``. They are called when
``metrics.jsonl``, the TensorBoard events and ``summary.json`` are written, and the console has shown it.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError
from hvdtrain.storage.files import parse_line
from hvdtrain.workers.user_errors import task_errors
from hvdtrain.workers.wire_types import travels

if TYPE_CHECKING:
    from hvdtrain.backends.step_metrics import StepMetrics
    from hvdtrain.config import Config
    from hvdtrain.metrics import StepInfo

TRAIN, EVAL, CALLBACK, EVENT = "train", "eval", "callback", "event"  # phases of the lines of metrics.jsonl
SHOULD_STOP = "should_stop"
ON_STEP, ON_WINDOW = "on_step", "on_window"
HOOKS = ("on_start", ON_STEP, ON_WINDOW, "on_evaluation", "on_checkpoint", "on_workers_changed", "on_end")


def _ignore(*_: Any) -> None:
    pass


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
        best_checkpoint: the one that ``keep_best`` keeps; None without it.
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
    best_checkpoint: str | None = None
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

    def _repr_html_(self) -> str:
        """Return it as the table that a notebook shows."""
        last = ", ".join(f"{name} {value:.4f}" for name, value in self.final.items())
        best = ", ".join(f"{name} {one.value:.4f} at step {one.step:,}" for name, one in self.best.items())
        speed = f"{self.seconds:.1f} s, {self.samples_per_second:,.0f} samples/s"
        rows = {
            "status": self.error or self.status, "steps": f"{self.steps:,} in {speed}",
            "last evaluation": last, "best": best, "run directory": self.run_dir,
            "checkpoint": self.checkpoint or "", "best checkpoint": self.best_checkpoint or "",
        }  # fmt: skip
        shown = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text)
        return f"<table>{''.join(shown)}</table>"

    def __repr__(self) -> str:
        """Return it in one short line."""
        values = "".join(f", {name} {value:.4f}" for name, value in self.final.items())
        return f"<Summary: {self.status}, {self.steps:,} steps{values}, {self.run_dir}>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values; what is not so in every run, such as an error, only where it is.

        Without ``best`` and ``metrics_log``, which metrics.jsonl has.
        """
        kept = [item for item in fields(self) if item.name not in ("best", "metrics_log")]
        values = {item.name: getattr(self, item.name) for item in kept}
        needed = [one.name for one in kept if one.default is MISSING and one.default_factory is MISSING]
        always = {*needed, "checkpoint"}
        return {name: value for name, value in values.items() if value or name in always}


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the records of lines, with NaN where a number is not finite; a line that is cut is left out."""
    records = []
    for line in lines:
        record = parse_line(line)
        if record is not None and isinstance(record.get("step"), int):
            records.append(record if record.get("phase") == EVENT else with_nan(record))
    return records


def with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers that came through JSON; NaN for one that was not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}


@dataclass
class RunContext:
    """What a callback can use of a run. Given to ``on_start``.

    It changes only with the workers of an elastic job, just before ``on_workers_changed``.

    Attributes:
        rank: this worker's rank now.
        workers: number of workers now.
        config: the resolved config.
        task: the task.
        model: the framework's own model: a ``torch.nn.Module`` or a ``keras.Model``.
        train_data: the training data, a Dataset.
        eval_data: the evaluation data, a Dataset, or None; of several sets the first.
        eval_sets: all sets of the evaluation data, Datasets by name; data without a name have the name "".
        run_dir: the run directory. Only rank 0 writes into it by itself.
        steps: number of steps of the whole training.
        steps_done: steps that were done before this process started; 0 unless it resumed.
        note: shows a line of text to the user; on other ranks than 0 it does nothing.
        log: ``log(step, values)`` writes numbers, texts and images by name at a step (a StepInfo) to
            ``metrics.jsonl``, with the phase "callback", to TensorBoard and to trackers; on other ranks than
            0 it does nothing. An image is an array of uint8, or of floats from 0 to 1, with the shape
            (height, width) or (height, width, channels); it is a PNG file in ``images`` of the run directory.
        seconds: returns the seconds spent training so far.
    """

    rank: int
    workers: int
    config: "Config"
    task: Any = None
    model: Any = None
    train_data: Any = None
    eval_data: Any = None
    eval_sets: Mapping[str, Any] = field(default_factory=dict)
    run_dir: Path = Path()
    steps: int = 0
    steps_done: int = 0
    note: Callable[[str], None] = _ignore
    log: Callable[["StepInfo", Mapping[str, Any]], None] = _ignore
    seconds: Callable[[], float] = lambda: 0.0


class Callback:
    """A callback that does nothing: override what is needed. A callback need not inherit from it.

    Unless ``every_rank`` is True, only rank 0 calls the hooks, and no hook may call a collective: the other
    workers would not take part, and all would wait for ever. With ``every_rank = True`` every worker calls
    them at the same steps, and hooks other than ``on_checkpoint`` and ``on_end`` may call collectives. An
    exception in a hook ends the job, with the exit code of an error in the task's own code.

    Attributes:
        every_rank: whether every worker calls the hooks, each on its own object; otherwise rank 0 alone.
    """

    every_rank = False

    def on_start(self, context: RunContext) -> None:
        """Called once, before the first step of this process. The model has its weights.

        Args:
            context: what can be used of the run; keep it for the other hooks.
        """

    def on_step(self, step: "StepInfo", metrics: "StepMetrics") -> None:
        """Called after each step, before the next one begins.

        It may freeze or thaw parameters, on all workers alike. The time spent here counts in the throughput.
        With local steps it is called when the workers synchronise, with the sums of all steps since they last
        did.

        Args:
            step: the step.
            metrics: sums over all samples of the global batch; ``mean("loss")`` is the mean loss.
        """

    def on_window(self, step: "StepInfo", values: Mapping[str, float]) -> None:
        """Called after each logged window of training (``log_every``).

        Args:
            step: the window's last step.
            values: means over the window's samples ("loss" and the task's metrics), "learning_rate",
                "samples_per_second", "data_wait_fraction" and, if they are measured, "gradient_norm",
                "slowest_rank" and "wait_fraction"; "peak_memory_mib"; "bad_samples" if samples were skipped:
                as in ``metrics.jsonl``.
        """

    def on_evaluation(self, step: "StepInfo", metrics: Mapping[str, float]) -> None:
        """Called after each evaluation.

        The model is in evaluation mode and still has the moving average of its weights, if the run keeps
        one. It may be called, not changed. The time spent here does not count in the throughput.

        Args:
            step: the last step before the evaluation.
            metrics: means over the evaluation data ("loss" and the task's metrics, with the name of the set
                before them for sets other than the first: "noisy/loss"), "learning_rate",
                "samples_per_second" and "peak_memory_mib", as in ``metrics.jsonl``; "bad_samples" if samples
                were left out.
        """

    def should_stop(self, step: "StepInfo", metrics: Mapping[str, float]) -> str:
        """Called on rank 0 after each evaluation but the last, when ``on_evaluation`` has been called.

        All workers wait for the answer, so that they end at the same step.

        Args:
            step: the last step before the evaluation.
            metrics: means over the evaluation data, alone.

        Returns:
            Why training ends here, as early stopping ends it; empty if it continues.
        """
        return ""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called on rank 0, which writes checkpoints, when one is complete on the disk.

        Checkpoints are written in the background, so this comes some steps later, in the main thread. A
        checkpoint that is still being written when the job fails is not reported.

        Args:
            step: the checkpoint's step.
            path: its directory; retention may delete it later.
        """

    def on_workers_changed(self, context: RunContext) -> None:
        """Called when an elastic job continues with other workers, before their first step.

        A worker that joins gets ``on_start`` instead, and so does a callback of a worker that becomes rank 0,
        unless it has been called already. Then the run may have begun long ago.

        Args:
            context: the one that ``on_start`` got, with the new ``rank`` and ``workers``.
        """

    def on_end(self, summary: "Summary") -> None:
        """Called last and once, however training ended, if ``on_start`` returned.

        An exception ends the job only if training completed; otherwise it is noted, and the job ends with
        the outcome that it had.

        Args:
            summary: how training ended, as in ``summary.json``; on other ranks than 0 it says nothing of
                checkpoints.
        """


def find_callbacks(task: Any, spec: str, given: Sequence[Any] = ()) -> list[Any]:
    """Return the task's callbacks, then those ``given`` to ``hvdtrain.train``, checked. Local."""
    own = getattr(task, "callbacks", None)
    if callable(own):
        with task_errors(f"callbacks() of task {spec} failed"):
            own = own()
    callbacks: list[Any] = []
    for value, what in ((own, f"callbacks of task {spec}"), (given, "callbacks")):
        if not isinstance(value, list | tuple | None):
            raise TaskError(f"{what} must be a list, found a {type(value).__name__}")
        callbacks += value or []
    for callback in callbacks:
        if inspect.isclass(callback):
            name = callback.__name__
            raise TaskError(f"callback {name} is a class, not an object", f"Write {name}() in the list.")
        if not any(callable(getattr(callback, hook, None)) for hook in (*HOOKS, SHOULD_STOP)):
            raise TaskError(
                f"callback {name_of(callback)} has none of the methods that are called",
                f"They are {', '.join(HOOKS)}; `hvdtrain docs callbacks` describes them, and what stands for "
                "the callbacks of Keras.",
            )
        for name in dir(callback):
            close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
            if name not in HOOKS and name.startswith("on_") and close and callable(getattr(callback, name)):
                raise TaskError(
                    f"callback {name_of(callback)} has a method {name}, which is never called",
                    f"Did you mean {close[0]}?",
                )
    return callbacks


def name_of(callback: Any) -> str:
    """Return what messages call a callback: the name of its class."""
    return type(callback).__name__


def hook_of(callback: Any, hook: str) -> Callable[..., None] | None:
    """Return a callback's method for a hook; None if it has none but that of ``Callback``."""
    method = getattr(callback, hook, None)
    inherited = getattr(method, "__func__", None) is getattr(Callback, hook)
    return None if inherited or not callable(method) else method
