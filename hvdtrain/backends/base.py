"""The seam between the loop and the frameworks.

Methods that every rank must call, in the same order, have docstrings that start with
"Collective."
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

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
from hvdtrain.workers.agreement import Workers


class PendingMetrics(Protocol):
    """The metrics of a step on their way from the device."""

    def read(self) -> StepMetrics:
        """Wait for the device if need be and return the metrics; all but names are equal on all workers."""
        ...


class PendingState(Protocol):
    """A copy of model and optimizer on its way to portable state."""

    def read(self) -> PortableState:
        """Wait for the copies and lay them out, freeing them. May be called once, in another thread."""
        ...


class Probes(Protocol):
    """What looks at a model and its steps without training it: dry run, memory, recorder and clock."""

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state; exceptions are in the result.

        Model, loss and metrics are computed, in training also this worker's gradient. The only collectives
        are those of the model itself, such as synchronised batch norm: a lost peer is raised.
        """
        ...

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
        ...

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        ...

    def recorder(self) -> StepRecorder:
        """Return what records this worker's steps. Local: no collective."""
        ...

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective."""
        ...


class TrainedParameters(Protocol):
    """What follows callbacks that freeze, thaw or replace parameters during training."""

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since ``follow_trained``. Local: no collective."""
        ...

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what is trainable now, or what a checkpoint keeps; return how many numbers. Local.

        All workers do so at the same step. Others keep what they have of parameters that are frozen.
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


class LocalSteps(Protocol):
    """Local SGD: steps that are local, and what makes the workers equal after some of them."""

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them."""
        ...


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


class ModelFiles(Protocol):
    """Models in files of a framework's own: what exporting and importing need, and training does not."""

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local.

        The batches are real samples, in several sizes; the largest first.
        """
        ...

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local.

        Raises CheckpointError if the file would run code, is damaged or does not fit.
        """
        ...

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective.

        They are those of the call of the model that the task's loss makes, or what the task's own function
        for serving returns.
        """
        ...

    def plain_model(self) -> Any:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        ...


class Backend(Probes, TrainedParameters, LocalSteps, Resizable, ModelFiles, Protocol):
    """Whatever touches a tensor. The loop decides when it happens and with which number.

    Each framework's ``backend.py`` has a function ``start(config)``, collective, that starts Horovod,
    binds this worker's device and returns the backend.
    """

    workers: Workers  # the job's
    info: BackendInfo  # what is known when the backend has started
    model: Any  # the framework's own model after ``build``; for callbacks, the loop leaves it alone
    replica_state: ReplicaState  # the workers' copies of what no optimizer updates, after ``build``
    weight_shapes: Shapes  # of the whole model's arrays by portable name, after ``build``

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and compiled steps, with their initial values.

        Local, but collective if the model is split into stages: by a batch of training data.
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
        """Collective. Return a context in which the model has its weights' moving average, if any."""
        ...

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved.

        Return the names of what training changes on each worker by itself, which the dry run did not find.
        """
        ...

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order."""
        ...

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread.

        Return the copy on rank 0, None on others; steps that follow do not change it. Sharded state is
        gathered into a temporary file in the folder ``spool`` on rank 0, if one is given, or into memory.
        """
        ...

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        """Collective. Load rank 0's portable state, or a part of it, into every worker.

        Everything is checked before anything changes. Names that are private to a framework
        (``PRIVATE``) may be missing; so may the moving average, which then starts from the weights.
        """
        ...

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        ...

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod. Whoever keeps this function does not keep the model."""
        ...
