"""The seam between the loop and the frameworks.

Methods that every rank must call, in the same order, have docstrings that start with
"Collective."
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdtrain.agreement import Workers
from hvdtrain.backends.choice import Choice
from hvdtrain.backends.portable.files import Exported
from hvdtrain.backends.recording import StepRecorder
from hvdtrain.backends.step_signals import (
    NO_FLAGS,
    NO_SIGNALS,
    NO_STATISTICS,
    SIGNALS,
    ControlFlags,
    StepStatistics,
    decode_signals,
)
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch

PortableState = dict[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class BackendInfo:
    """What a backend knows when it has started.

    Attributes:
        description: framework, version and device, such as "PyTorch 2.13.0 on the CPU".
        versions: by name, what must be equal on all workers.
    """

    description: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class OwnRates:
    """The learning rates of a task's own optimizer.

    Attributes:
        optimizer: the name of its class.
        base: the largest rate of its parameter groups; None if it has none.
        is_default: whether all groups have the rate that its constructor sets by default.
        factors: what each group's rate is multiplied by, relative to the base.
    """

    optimizer: str
    base: float | None
    is_default: bool
    factors: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class ModelInfo:
    """What a backend knows when it has built the model.

    Attributes:
        parameter_shapes: shapes of the trainable parameters by portable name.
        batch_norm_layers: number of batch-norm layers.
        reduction: how gradients are reduced, for the plan.
        own_rates: the learning rates of the task's own optimizer, if it brings one.
        notes: what the user should know of the model before training, in words.
        frozen_parameters: number of parameters, as numbers and not as tensors, that are not trained.
        groups: the parameter groups of the config, in words.
    """

    parameter_shapes: Mapping[str, tuple[int, ...]]
    batch_norm_layers: int
    reduction: str
    own_rates: OwnRates | None = None
    notes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    frozen_parameters: int = 0


@dataclass(frozen=True)
class DryRun:
    """What came of one micro-batch that was computed without changing anything.

    Attributes:
        outputs: what the model's last call returned, with arrays in place of tensors; None if the model
            was not called or its outputs cannot be read.
        values: name to array (samples,); "loss" and the task's metrics. Empty after an error.
        last_activation: "softmax" or "sigmoid" if the model's last layer computes it; empty otherwise.
        error: the exception that ended the computation, or None.
        note: what the user should know of the computation, in words; empty if nothing.
    """

    outputs: Any
    values: Mapping[str, NDArray[Any]]
    last_activation: str = ""
    error: Exception | None = None
    note: str = ""


FINDINGS = 2  # numbers between the sums and the signals of a step: unused parameters, overflow
NUMBERS_AFTER_SUMS = FINDINGS + SIGNALS
OVERFLOW_INDEX = 1 - NUMBERS_AFTER_SUMS  # where overflow_exhausted is, from the end of a step's vector


@dataclass(frozen=True)
class StepMetrics:
    """What a step, or an evaluation, adds up to over all workers.

    Attributes:
        sums: name to the weighted sum over samples; "loss" and the task's metrics.
        weight: sum of the samples' weights.
        weights: sum of the weights of those names whose values have weights of their own (``Weighted``);
            of all others it is ``weight``.
        unused_parameters: parameters that got no gradient, added up over workers.
        unused_names: those of this worker, by portable name.
        overflow_exhausted: whether gradients overflow at the lowest loss scale: no scale will help.
        flags: what any worker wants all of them to do.
        statistics: sums over the workers.
        busy_seconds: by rank, how long each worker was busy with its own part of the step before this one;
            empty if it is not measured.
    """

    sums: Mapping[str, float]
    weight: float
    unused_parameters: int = 0
    unused_names: tuple[str, ...] = ()
    overflow_exhausted: bool = False
    flags: ControlFlags = NO_FLAGS
    statistics: StepStatistics = NO_STATISTICS
    weights: Mapping[str, float] = field(default_factory=dict)
    busy_seconds: tuple[float, ...] = ()

    @classmethod
    def from_vector(
        cls,
        names: Sequence[str],
        vector: Sequence[float],
        weight: float,
        unused_names: Sequence[str] = (),
        weighted: Sequence[str] = (),
        *,
        timed: int = 0,
        workers: int | None = None,
    ) -> "StepMetrics":
        """Return what a reduced vector says.

        It consists of a sum for each name, a sum of weights for each weighted name, the busy seconds of
        ``timed`` ranks (all that there may be, or none), ``FINDINGS`` numbers and the signals.

        Args:
            names: "loss" and the metrics.
            vector: the reduced vector.
            weight: sum of the samples' weights over all workers.
            unused_names: this worker's parameters without a gradient.
            weighted: those of the names that have weights of their own.
            timed: see above.
            workers: how many ranks there were in the step; None if as many as are timed.
        """
        ends = len(names), len(names) + len(weighted), len(names) + len(weighted) + timed
        unused, overflow, *signals = vector[ends[2] :]
        return cls(
            dict(zip(names, vector[: ends[0]], strict=True)),
            weight,
            round(unused),
            tuple(unused_names),
            overflow > 0,
            *decode_signals(signals),
            weights=dict(zip(weighted, vector[ends[0] : ends[1]], strict=True)),
            busy_seconds=tuple(vector[ends[1] : ends[2]][:workers]),
        )

    def mean(self, name: str) -> float:
        """Return the mean of a value over what counts; NaN if nothing does."""
        weight = self.weights.get(name, self.weight)
        return self.sums[name] / weight if weight else math.nan

    def with_computed(self, values: Mapping[str, float], order: Sequence[str]) -> "StepMetrics":
        """Return the metrics with values of the whole evaluation among them.

        Args:
            values: the values by name.
            order: names in the order that the metrics are to have; others keep their place after these.
        """
        if not values:
            return self
        sums = {**self.sums, **values}
        first = [name for name in ("loss", *order) if name in sums]
        weights = {**self.weights, **dict.fromkeys(values, 1.0)}  # their mean is the value itself
        return replace(
            self, sums={name: sums[name] for name in dict.fromkeys((*first, *sums))}, weights=weights
        )

    def without_skipped_samples(self) -> "StepMetrics":
        """Return the metrics with skipped samples taken out of the weight: an evaluation leaves them out."""
        skipped = self.statistics.skipped_samples
        return replace(self, weight=self.weight - skipped) if skipped else self


class PendingMetrics(Protocol):
    """The metrics of a step on their way from the device."""

    def read(self) -> StepMetrics:
        """Wait for the device if need be and return the metrics.

        Sums, weight, findings, flags and statistics are the same on every worker.
        """
        ...


class PendingState(Protocol):
    """A copy of model and optimizer on its way to portable state."""

    def read(self) -> PortableState:
        """Wait for the copies and lay them out. May be called once, in another thread.

        Memory of the copies is freed as it goes.
        """
        ...


class Backend(Protocol):
    """Whatever touches a tensor. The loop decides when it happens and with which number.

    Each framework's ``backend.py`` has a function ``start(config)``, collective, that starts Horovod,
    binds this worker's device and returns the backend.

    Attributes:
        workers: the job's workers.
        info: what is known when the backend has started.
        model: the framework's own model after ``build``; for callbacks, the loop leaves it alone.
    """

    workers: Workers
    info: BackendInfo
    model: Any

    def build(self, task: Any, config: Config) -> ModelInfo:
        """Build model, optimizer and compiled steps, with their initial values. Local: no collective.

        Raises:
            TaskError: If the task's model, loss, metrics or optimizer do not fit.
        """
        ...

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[Any]:
        """Yield the device batches that the steps take, one ahead of the host's."""
        ...

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state.

        Model, loss and metrics are computed, in training also this worker's gradient. Parameters,
        moving statistics, the framework's random generators and the optimizer are as before when it
        returns. The only collectives are those of the model itself, such as synchronised batch norm.
        Metrics of a whole evaluation are computed of the micro-batch alone.

        Args:
            batch: a batch of training or evaluation data.
            training: whether to compute it as ``train_step`` or as ``eval_step`` does.

        Raises:
            PeerLostError: If another worker went away. Any other exception is in the result.
        """
        ...

    def train_step(
        self, batch: Any, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingMetrics:
        """Collective. Do one optimizer update with the mean gradient over the global batch.

        Args:
            batch: what ``to_device`` yielded.
            learning_rate: that of this step.
            signals: what this worker tells all of them; their sum comes back with the metrics.

        With local steps, this is local: the gradient is the mean over this worker's samples, and the metrics
        are its own. ``synchronize`` brings those of all workers.
        """
        ...

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them.

        The workers average their parameters and what their optimizers keep, or take the outer optimizer's
        step. Only for a job with local steps.
        """
        ...

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective.

        The loop calls it before the first step and after each pause, such as an evaluation.
        """
        ...

    def recorder(self) -> StepRecorder:
        """Return what records this worker's steps. Local: no collective."""
        ...

    def eval_step(self, batch: Any, partial: Any = None) -> Any:
        """Evaluate one batch and return the sums so far. Local: no collective.

        Args:
            batch: what ``to_device`` yielded.
            partial: what the call before returned; None in the first.
        """
        ...

    def eval_metrics(self, partial: Any, signals: Sequence[float] = NO_SIGNALS) -> PendingMetrics:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it.

        Args:
            partial: what this worker's last ``eval_step`` returned.
            signals: what this worker tells all of them.
        """
        ...

    def ema_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the moving average of its weights, if there is one.

        Local: no collective.
        """
        ...

    def sync_batch_norm_statistics(self) -> None:
        """Collective. Average the moving statistics of batch norm over workers."""
        ...

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each trainable parameter of this worker, in a fixed order.

        Local: no collective.
        """
        ...

    def gather_state(self) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread.

        What this costs is a plain copy of the tensors; layouts are changed when the copy is read.
        Steps that follow do not change it.

        Returns:
            The copy on rank 0, None on other ranks.

        Raises:
            TaskError: If the optimizer holds something that cannot be saved.
        """
        ...

    def scatter_state(self, state: PortableState | None) -> None:
        """Collective. Load rank 0's portable state into every worker's model and optimizer.

        Everything is checked before anything changes. Names that are private to a framework
        (``PRIVATE``) may be missing; so may the moving average, which then starts from the weights.

        Args:
            state: the state on rank 0; not looked at on other ranks.

        Raises:
            TaskError: On every worker, listing missing, unexpected and misshapen names.
        """
        ...

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        ...

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local.

        An elastic job calls it after ``workers.restart``, before any other collective.
        """
        ...

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker.

        All that training goes on from, and what random numbers follow from, is as before.

        Args:
            batch: a batch of training data.
            eval_batch: a batch of evaluation data, if there is any.
        """
        ...

    def close(self) -> None:
        """Collective. Leave Horovod."""
        ...


class ModelFiles(Protocol):
    """Models in files of a framework's own: what exporting and importing need, and training does not."""

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local.

        Args:
            format_name: one that ``hvdtrain.jobs.export_formats`` lists for this framework.
            path: the file or directory to write.
            batches: real samples, in batches of several sizes; the largest first.

        Raises:
            TaskError: If the model cannot be written in this format.
        """
        ...

    def load_weights_file(self, path: Path, choice: Choice) -> str:
        """Load a framework's own file of weights into the model; return what it held, in words. Local.

        Args:
            path: the file.
            choice: which part of it is loaded; its patterns match the file's names and portable ones.

        Raises:
            CheckpointError: If it would run code, is damaged or does not fit.
        """
        ...

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective.

        They are those of the call of the model that the task's loss makes, or what the task's own function
        for serving returns.

        Args:
            batch: what ``to_device`` yielded.

        Raises:
            TaskError: If the loss does not call the model once.
        """
        ...

    def plain_model(self) -> Any:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        ...
