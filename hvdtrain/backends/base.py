"""The seam between the loop and the frameworks, and what both do in the same way.

Methods that every rank must call, in the same order, have docstrings that start with "Collective." Each
framework's ``backend.py`` has the class that has the rest, and a function ``start(config, ...)``, collective,
that starts Horovod, binds this worker's device and returns the backend.
"""

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
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
from hvdtrain.backends.step_metrics import NO_SIGNALS, PendingVector
from hvdtrain.backends.trained_set import Change
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ReplicaDriftError
from hvdtrain.workers.agreement import Workers

_RANKS_NAMED = 8
# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6


class PendingState(Protocol):
    """A copy of model and optimizer on its way to portable state."""

    def read(self) -> PortableState:
        """Wait for the copies and lay them out, freeing them. May be called once, in another thread."""
        ...


class _Built(ABC):
    """What a backend has: the workers, and after ``build`` the step that was chosen and its parts."""

    workers: Workers  # the job's
    info: BackendInfo  # what is known when the backend has started
    model: Any  # the framework's own model, or the layers of this worker's stage; the loop leaves it alone
    replica_state: ReplicaState  # the workers' copies of what no optimizer updates
    weight_shapes: Shapes  # of the whole model's arrays by portable name
    step: Any
    parts: Any  # what the step is made of
    _hvd: Any  # of the framework: its binding of Horovod
    _probes: Any  # and its modules ``probes``
    _files: Any  # and ``export``
    _recorder: Any  # the class of what records steps
    _untrained: Any  # the class of the state that no optimizer updates
    _state_tensors: Any  # that of this model
    _moving: Any  # what keeps the values that a failed step takes back
    _state: Any  # model and optimizers as portable state

    def _take(self, parts: Any) -> None:
        """Take the parts of a step, at first and when others are trained."""
        self.parts, self.optimizers = parts, list(parts.optimizers.values())
        self.step.attach(parts)
        self._state = self.step.make_state()

    def _forms(self, batch: HostBatch) -> list[HostBatch]:
        """Return a batch in each form that a step is compiled for."""
        return [batch]

    @abstractmethod
    def _make(self, task: Any, config: Config, batch: HostBatch | None) -> Any:
        """Return the parts of the step that it chooses, with initial values. Collective if split."""

    @abstractmethod
    def _moving_state(self, changed_early: Sequence[Any] = ()) -> Any:
        """Return what keeps the values that a step changes while it may still fail."""

    @abstractmethod
    def _state_of_layers(self, is_root: bool) -> PortableState:
        """Return what layers keep other than tensors, on rank 0."""

    @abstractmethod
    def _all_kept(self) -> AbstractContextManager[object]:
        """Return a context after which everything that steps change is as it was."""


class Seam(_Built):
    """What every job needs of a framework. The loop decides when that happens and with which numbers."""

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and steps, with initial values. Local, but collective with stages."""
        self._take(parts := self._make(task, config, batch))
        step, self.model = self.step, parts.computation.model
        self.weight_shapes = step.weight_shapes(self._state.weight_shapes())
        self._state_tensors = self._untrained(self.model, parts.tensors)
        replicas, collectives = step.replicas()
        self.replica_state = ReplicaState(
            task, replicas, collectives, self._state_tensors, replicas is self.workers
        )
        self._moving = self._moving_state(step.changed_early())
        if config.initial_parameters == "portable":
            self._state.load_initial(config.seed)
        return step.describe(parts.describe(step))

    @abstractmethod
    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[Any]:
        """Yield the device batches of the steps, each with its ``samples``, one ahead of the host's."""

    def train_step(
        self, batch: Any, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingVector:
        """Collective. Do one update with the mean gradient, or leave all as it was; local in local steps."""
        self.parts.computation.begin_step(batch.step)
        try:
            if self.workers.is_elastic:
                self._moving.keep()
            with peer_errors():
                return self.step.train(batch, learning_rate, signals)
        except BaseException:
            self.step.forget()
            if self.workers.is_elastic:
                self._moving.restore()
            raise

    def eval_step(self, batch: Any, partial: Any = None) -> Any:
        """Evaluate one batch and return the sums so far. Local unless loss or stages communicate."""
        return self.step.evaluate(batch, partial)

    def eval_metrics(self, partial: Any, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        return self.step.evaluated(partial, signals)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has its weights' moving average, if any."""
        return self.parts.ema.in_model()

    def sync_statistics(self) -> list[str]:
        """Collective. Give all one state of what no optimizer updates; return the names of late changes."""
        error = self._state_tensors.take_back()
        with peer_errors():
            return self.replica_state.combine(error)

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order."""
        fields = self._state.model.trainable_fields()
        trained = [(field.name, zlib.crc32(field.read().data)) for field in fields]
        return [*trained, *self.replica_state.checksums()]

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read; None on others."""
        self._state.check()
        with peer_errors():
            kept = self.parts.reducer.state()
        is_root = self.workers.rank == 0
        return self._state.gather(kept | self._state_of_layers(is_root), spool, is_root=is_root)

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        """Collective. Load rank 0's portable state, or a part of it, into every worker, if it fits."""
        self.step.scatter(state or {}, part)
        self.broadcast_state(0)
        if part is StatePart.ALL:
            self._state.distribute(state)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        self.replica_state.restart()
        if self.workers.size == 1:
            return
        self._state_tensors.take_back()
        with peer_errors():
            if self.workers.is_elastic:
                self.replica_state.follow(self.workers, root)
            self.step.broadcast(root)

    @classmethod
    def close(cls) -> None:
        """Collective. Leave Horovod. Whoever keeps this function does not keep the model."""
        cls._hvd.shutdown()


class Resizable(Seam):
    """What lets training continue with other workers, in an elastic job."""

    def enter_world(self) -> None:
        """Forget what a failed step began, and take the workers anew, after ``workers.restart``. Local."""
        self.step.forget()
        self.parts.computation.evaluation.begin()
        self.parts.clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step and an evaluation, alone, and undo them. Local: one worker."""
        wrap = self.parts.computation.wrap
        with self._all_kept():
            for one in self._forms(batch):
                self.train_step(wrap(one), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(wrap(eval_batch))
        self.enter_world()


class Probes(_Built):
    """What looks at a model and its steps without training it: dry run, memory, recorder and clock."""

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch and change nothing; exceptions are in the result."""
        return self._probes.dry_run(self.step, self._state_tensors, batch, training)

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
        if training not in self.step.compared:
            return ""
        found: str = self._probes.find_comparing(self.step.computation, batch, training)
        return found

    @abstractmethod
    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""

    def recorder(self) -> StepRecorder:
        """Return what records this worker's steps. Local: no collective."""
        return self._recorder(self.parts.clock)

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective."""
        self.parts.clock.restart()


class TrainedParameters(_Built):
    """What follows callbacks that freeze, thaw or replace parameters during training."""

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since ``follow_trained``. Local: no collective."""
        return self.parts.trained_set.change()

    @abstractmethod
    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what is trainable now, or what a checkpoint keeps; return how many numbers. Local."""

    @abstractmethod
    def undone_step(self, batch: Any, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it."""

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        return self.parts.trained_set.state(**self.parts.known()) if not self.step.is_own else None


class LocalSteps(_Built):
    """Local SGD: steps that are local, and what makes the workers equal after some of them."""

    def synchronize(self) -> PendingVector:
        """Collective. Make the workers equal after local steps; return the sums of all of them."""
        with peer_errors():
            return self.step.synchronize()


class ModelFiles(_Built):
    """Models in files of a framework's own: what exporting and importing need, and training does not."""

    @abstractmethod
    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs of batches. Local."""

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights, without its code; return a note on it. Local."""
        held: str = self._files.load_weights_file(self.model, path)
        self.parts.ema.restart()
        return held

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name, as loss or serving of the task need them."""
        return self.parts.computation.predict(batch)

    @abstractmethod
    def plain_model(self) -> Any:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""


class Backend(Probes, TrainedParameters, LocalSteps, Resizable, ModelFiles):
    """Whatever touches a tensor."""


def check_replicas(backend: Backend) -> None:
    """Collective. Check that every worker holds the same model, by one small checksum."""
    workers = backend.workers
    if workers.size == 1:
        return
    checksums = backend.parameter_checksums()
    digest = blake2b(repr(checksums).encode(), digest_size=16).digest()
    if len(set(workers.allgather_object(digest))) == 1:
        return
    everyone = workers.allgather_object((workers.host, checksums))
    # by name and rank: of a split model, workers have other parameters
    having: dict[str, dict[int, int]] = {}
    for rank, (_, of_rank) in enumerate(everyone):
        for name, crc in of_rank:
            having.setdefault(name, {})[rank] = crc
    differing = {name: found for name, found in having.items() if len(set(found.values())) > 1}
    crcs = {name: set(found.values()) for name, found in differing.items()}
    explained = backend.replica_state.explain(crcs)
    drifted: dict[int, str] = {}  # by rank, its first parameter that differs
    for name, found in differing.items():
        usual = Counter(found.values()).most_common(1)[0][0]
        for rank in (rank for rank, crc in found.items() if crc != usual and name not in explained):
            drifted.setdefault(rank, name)
    if not drifted:
        return
    ranks = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in sorted(drifted)[:_RANKS_NAMED])
    raise ReplicaDriftError(
        f"the workers' parameters differ: {ranks} drifted from the others, first in {drifted[min(drifted)]}",
        "A worker computed something else: faulty memory, another library, or a task that changes it on its "
        "own. If training does so, name it in the task's state_reductions.",
        everywhere=True,
    )
