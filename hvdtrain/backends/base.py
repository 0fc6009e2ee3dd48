"""The seam between the loop and the frameworks.

Methods that every rank must call, in the same order, have docstrings that start with
"Collective."
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from numpy.typing import NDArray

from hvdtrain.backends.recording import StepRecorder
from hvdtrain.backends.records import (
    BackendInfo,
    DeviceMemory,
    DryRun,
    Exported,
    ModelInfo,
    PortableState,
    Shapes,
    StatePart,
)
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.step_metrics import NO_SIGNALS, StepMetrics
from hvdtrain.backends.trained_set import Change
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import UsageError
from hvdtrain.workers.agreement import Workers


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
        replica_state: the workers' copies of the model's state that no optimizer updates, after ``build``.
        weight_shapes: the shapes of the whole model's arrays by portable name, after ``build``.
    """

    workers: Workers
    info: BackendInfo
    model: Any
    replica_state: ReplicaState
    weight_shapes: Shapes

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and compiled steps, with their initial values.

        Local, but collective if the model is split into stages: by a batch of training data.

        Raises:
            TaskError: If the task's model, loss, metrics or optimizer do not fit.
        """
        ...

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[Any]:
        """Yield the device batches of the steps, each with its ``samples``, one ahead of the host's."""
        ...

    def train_step(
        self, batch: Any, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingMetrics:
        """Collective. Do one optimizer update with the mean gradient over the global batch.

        The sum of the signals of all workers comes back with the metrics.

        With local steps, this is local: the gradient is the mean over this worker's samples, and the metrics
        are its own. ``synchronize`` brings those of all workers.
        """
        ...

    def eval_step(self, batch: Any, partial: Any = None) -> Any:
        """Evaluate one batch and return the sums so far. Local unless loss or stages communicate."""
        ...

    def eval_metrics(self, partial: Any, signals: Sequence[float] = NO_SIGNALS) -> PendingMetrics:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        ...

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has its weights' moving average, if there is one.

        With sharded state, the workers gather it when the context is entered.
        """
        ...

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved.

        Returns:
            The names of what training changes on each worker by itself, which the dry run did not find.
        """
        ...

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order.

        Local: no collective.
        """
        ...

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread.

        What this costs is a plain copy of the tensors; layouts are changed when the copy is read.
        Steps that follow do not change it.

        Args:
            spool: a folder on rank 0. Sharded state is gathered into a temporary file there, so that rank 0's
                memory does not hold what belongs to all workers; if None, its memory does.

        Returns:
            The copy on rank 0, None on other ranks.

        Raises:
            TaskError: If the optimizer holds something that cannot be saved.
        """
        ...

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        """Collective. Load rank 0's portable state, or a part of it, into every worker.

        Everything is checked before anything changes. Names that are private to a framework
        (``PRIVATE``) may be missing; so may the moving average, which then starts from the weights.

        Raises:
            TaskError: On every worker, listing missing, unexpected and misshapen names.
        """
        ...

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        ...

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod. Whoever keeps this function does not keep the model."""
        ...


@runtime_checkable
class Probes(Protocol):
    """What looks at a model and its steps without training it: dry run, memory, recorder and clock."""

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state.

        Model, loss and metrics are computed, in training also this worker's gradient. Parameters,
        moving statistics, the framework's random generators and the optimizer are as before when it
        returns. The only collectives are those of the model itself, such as synchronised batch norm.
        Metrics of a whole evaluation are computed of the micro-batch alone.

        Raises:
            PeerLostError: If another worker went away. Any other exception is in the result.
        """
        ...

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or "".

        It follows a dry run of a task that has a loss or metric of its own.
        """
        ...

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        ...

    def recorder(self) -> StepRecorder:
        """Return what records this worker's steps. Local: no collective."""
        ...

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective.

        The loop calls it before the first step and after each pause, such as an evaluation.
        """
        ...


@runtime_checkable
class TrainedParameters(Protocol):
    """What follows callbacks that freeze, thaw or replace parameters during training."""

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since ``follow_trained``. Local: no collective."""
        ...

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train from the next step on what is trainable now. Local: all workers do so at the same step.

        Reducer, optimizer and moving average keep what they have of parameters that are frozen.

        Args:
            kept: what ``trained_state`` returned, if that is to be trained; before its state is loaded.

        Returns:
            How many parameters, as numbers, are trained then.
        """
        ...

    def undone_step(self, batch: Any, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it.

        The others may do an ordinary step. Where the job cannot follow a change, something may remain.
        """
        ...

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        ...


@runtime_checkable
class LocalSteps(Protocol):
    """Local SGD: steps that are local, and what makes the workers equal after some of them."""

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them.

        The workers average their parameters and what their optimizers keep, or take the outer optimizer's
        step. Only for a job with local steps.
        """
        ...


@runtime_checkable
class Resizable(Protocol):
    """What lets training continue with other workers, in an elastic job."""

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local.

        An elastic job calls it after ``workers.restart``, before any other collective.
        """
        ...

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker.

        All that training continues from, and what random numbers follow from, is as before.
        """
        ...


@runtime_checkable
class ModelFiles(Protocol):
    """Models in files of a framework's own: what exporting and importing need, and training does not."""

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local.

        The batches are real samples, in several sizes; the largest first.

        Raises:
            TaskError: If the model cannot be written in this format.
        """
        ...

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local.

        Raises:
            CheckpointError: If it would run code, is damaged or does not fit.
        """
        ...

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective.

        They are those of the call of the model that the task's loss makes, or what the task's own function
        for serving returns.

        Raises:
            TaskError: If the loss does not call the model once.
        """
        ...

    def plain_model(self) -> Any:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        ...


# each of the following raises UsageError for a backend that does not have it
def probes(backend: Backend) -> Probes:
    """Return what looks at a backend's model and steps."""
    return cast(Probes, _having(backend, Probes, "a dry run and measurements"))


def device_memory(backend: Backend) -> DeviceMemory | None:
    """Return the memory of this worker's GPU; None on the CPU, or if a backend has no probes. Local."""
    return backend.device_memory() if isinstance(backend, Probes) else None


def trained_parameters(backend: Backend) -> TrainedParameters:
    """Return what lets a backend follow callbacks that freeze and thaw."""
    return cast(TrainedParameters, _having(backend, TrainedParameters, "freezing during training"))


def local_steps(backend: Backend) -> LocalSteps:
    """Return what makes a backend's workers equal after local steps."""
    return cast(LocalSteps, _having(backend, LocalSteps, "local SGD"))


def resizable(backend: Backend) -> Resizable:
    """Return what lets a backend continue with other workers."""
    return cast(Resizable, _having(backend, Resizable, "elastic jobs"))


def model_files(backend: Backend) -> ModelFiles:
    """Return what reads and writes a framework's own files of models."""
    return cast(ModelFiles, _having(backend, ModelFiles, "export and import"))


def _having(backend: Backend, protocol: type, capability: str) -> Any:
    if isinstance(backend, protocol):
        return backend
    raise UsageError(
        f"{backend.info.description}: this backend does not have {capability}",
        "Use --framework torch or tf, or leave out what needs it.",
        everywhere=True,
    )
