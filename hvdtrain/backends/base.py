"""The seam between the loop and the frameworks.

Methods that every rank must call, in the same order, have docstrings that start with
"Collective."
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdtrain.backends.choice import Choice
from hvdtrain.backends.recording import StepRecorder
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.step_metrics import NO_SIGNALS, StepMetrics
from hvdtrain.backends.trained_set import Change
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers

PortableState = dict[str, NDArray[Any]]
# a portable state, or a part of one, that is only read: an array may be fetched when it is asked for
StateArrays = Mapping[str, NDArray[Any]]
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
        notes: what the user should know of the model before training, as sentences.
        frozen_parameters: number of parameters, as numbers and not as tensors, that are not trained.
        groups: the parameter groups of the config, for the plan.
        stages: what each stage of a split model has, for the plan.
        stage_shapes: shapes of the trainable parameters of each stage; empty if the model is not split.
        stage_cuts: the first block of each stage but the first.
        slot_bytes: what the state of the task's own optimizers takes; 0 if that is not known.
        synchronized_layers: number of batch-norm layers that normalise over all workers.
        float_bits: bits of the floating-point numbers that the model takes, 32 or 64.
        leaves_out_padding: whether steps give the model no padding while there are samples.
    """

    parameter_shapes: Mapping[str, tuple[int, ...]]
    batch_norm_layers: int
    reduction: str
    own_rates: OwnRates | None = None
    notes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    frozen_parameters: int = 0
    stages: tuple[str, ...] = ()
    stage_shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    stage_cuts: tuple[int, ...] = ()
    synchronized_layers: int = 0
    slot_bytes: int = 0
    float_bits: int = 32
    leaves_out_padding: bool = False


@dataclass(frozen=True)
class Exported:
    """What came of an export that was loaded back.

    Attributes:
        difference: largest difference between outputs of the model and of what was loaded back;
            infinite where they do not compare.
        scale: largest number in the output that differs most.
        batch: the batch sizes and lengths that it takes, in words; empty where it holds weights only.
        inputs: the program's inputs, each with its type and shape; none where it holds weights only.
        outputs: its outputs, likewise.
        arguments: names of the inputs.
        is_plain: whether it is called with one tensor, without its name.
        checked: on what it was compared, in words.
        notes: what else to tell the user.
    """

    difference: float
    scale: float
    batch: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    is_plain: bool = True
    checked: str = ""
    notes: tuple[str, ...] = ()

    @property
    def relative(self) -> float:
        """The difference relative to the output's largest number."""
        return self.difference / self.scale if self.difference else 0.0

    def joined(self, other: "Exported") -> "Exported":
        """Return the worse of two comparisons of one model."""
        return max(self, other, key=lambda one: one.relative)


@dataclass(frozen=True)
class StepMemory:
    """What the forward and the backward pass of a micro-batch take of memory, in bytes.

    Attributes:
        activations: the most that tensors take at once which the passes make, without the gradients of
            parameters: what the backward pass needs of the forward pass, and what both need meanwhile.
        compiling: roughly, what the framework takes in addition to tensors when it compiles the step.
        idle: what the framework keeps of freed memory for tensors that are made later.
        largest: the largest tensors that the passes make: what they are and how many, and bytes of each.
    """

    activations: int
    compiling: int = 0
    idle: int = 0
    largest: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a worker's GPU, in bytes.

    Attributes:
        peak: the most that tensors have had.
        limit: how much it has; None if that is not known.
    """

    peak: int
    limit: int | None = None


@dataclass(frozen=True)
class DryRun:
    """What came of one micro-batch that was computed without changing anything.

    Attributes:
        outputs: what the model's last call returned, with arrays in place of tensors; None if the model
            was not called or its outputs cannot be read.
        values: name to array (samples,); "loss" and the task's metrics. Empty after an error.
        last_activation: "softmax" or "sigmoid" if the model's last layer computes it; empty otherwise.
        error: the exception that ended the computation, or None.
        note: what the user should know of the computation, as a sentence; empty if nothing.
        memory: what it took of memory in training; None if that is not known, as in a step of the task's own.
            After an error, it has the largest tensors alone.
        changed: checksums, by portable name, of the state that it changed before it was put back.
        refusal: what makes the model one that cannot be trained as it is, though nothing failed.
        changed_inputs: names of the arrays that it changed in place.
        weighted: names of those values that have weights of their own, as a mean of the batch has.
    """

    outputs: Any
    values: Mapping[str, NDArray[Any]]
    last_activation: str = ""
    error: Exception | None = None
    note: str = ""
    memory: StepMemory | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    refusal: TaskError | None = None
    changed_inputs: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()


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
    """

    workers: Workers
    info: BackendInfo
    model: Any
    replica_state: ReplicaState

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and compiled steps, with their initial values.

        Local, but collective if the model is split into stages.

        Args:
            task: the task.
            config: the resolved config.
            batch: a batch of training data, by which a split model is divided; not looked at in other jobs.

        Raises:
            TaskError: If the task's model, loss, metrics or optimizer do not fit.
        """
        ...

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[Any]:
        """Yield the device batches of the steps, each with its ``samples``, one ahead of the host's."""
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

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or "".

        It follows a dry run of a task that has a loss or metric of its own.
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

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
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
        """Collective. Return a context in which the model has its weights' moving average, if there is one.

        With sharded state, the workers gather it when the context is entered.
        """
        ...

    def combine_state(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved.

        Returns:
            The names of what training changes on each worker by itself, which the dry run did not find.
        """
        ...

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

    def checksums(self) -> list[tuple[str, int]]:
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

    def weight_shapes(self) -> Shapes:
        """Return the shapes of the whole model's arrays, by portable name. Collective if it is split."""
        ...

    def scatter_weights(self, weights: PortableState | None, is_part: bool = False) -> None:
        """Collective. Load rank 0's weights into every worker's model; its optimizer stays as it is.

        Everything is checked before anything changes. A moving average starts from these weights.

        Args:
            weights: the model's part of a portable state on rank 0; not looked at on other ranks.
            is_part: whether arrays of the model may be missing, which then stay as rank 0 has them.

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

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod. Whoever keeps this function does not keep the model."""
        ...


class ModelFiles(Protocol):
    """Models in files of a framework's own: what exporting and importing need, and training does not."""

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local.

        Args:
            format_name: one that ``hvdtrain.config.values`` lists for this framework.
            path: the file or directory to write.
            batches: real samples, in batches of several sizes; the largest first.

        Raises:
            TaskError: If the model cannot be written in this format.
        """
        ...

    def load_weights_file(self, path: Path, choice: Choice) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local.

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
