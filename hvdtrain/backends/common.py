"""What the backends of both frameworks do in the same way, and checks of the workers' copies of a model."""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, PendingMetrics, PendingState
from hvdtrain.backends.recording import StepRecorder
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.step_metrics import NO_SIGNALS, PartialSums
from hvdtrain.backends.trained_set import Change, describe_change, refused_change
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ReplicaDriftError
from hvdtrain.workers.agreement import Workers

_RANKS_NAMED = 8
# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6


class CommonBackend:
    """A backend's methods that need nothing of the framework, over the step that ``build`` has chosen.

    Attributes:
        model: the task's model, or the layers of this worker's stage, after ``build``.
        parts: what the step is made of, likewise.
    """

    workers: Workers
    model: Any
    replica_state: ReplicaState
    weight_shapes: Shapes
    step: Any
    parts: Any
    # of the framework: its modules ``probes``, ``export`` and ``steps/parts.py``, and the classes of what
    # records steps and of the state that no optimizer updates
    _probes: Any
    _files: Any
    _making: Any
    _recorder: Any
    _untrained: Any
    _moving: Any
    _state: Any
    # (task, config, batch) -> parts of the step that it chooses, with initial values; collective if split
    _make: Callable[[Any, Config, HostBatch | None], Any]
    # what keeps the values that a step changes while it may still fail
    _moving_state: Callable[[Sequence[Any]], Any]
    _optimizers_of: Callable[[Any], list[Any]]  # of the parts, for callbacks
    _state_of_layers: Callable[[bool], PortableState]  # what layers keep other than tensors, on rank 0
    # a context after which everything that steps change is as it was
    _all_kept: Callable[[], AbstractContextManager[None]]

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and steps, with their initial values. Collective if the model is split."""
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
        info: ModelInfo = step.describe(self._making.describe_parts(step, parts))
        return info

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state."""
        found: DryRun = self._probes.dry_run(self.step, self._state_tensors, batch, training)
        return found

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
        found: str = self.step.find_comparing(batch, training)
        return found

    def train_step(
        self, batch: Any, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingMetrics:
        """Collective. Do one optimizer update with the mean gradient over the global batch.

        A step that fails leaves everything as it was, in a job that continues without a worker.
        """
        self.step.begin(batch)
        try:
            if self.workers.is_elastic:
                self._moving.keep()
            with peer_errors():
                pending: PendingMetrics = self.step.train(batch, learning_rate, signals)
                return pending
        except BaseException:
            self.step.forget()
            if self.workers.is_elastic:
                self._moving.restore()
            raise

    def eval_step(self, batch: Any, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        found: PartialSums = self.step.evaluate(batch, partial)
        return found

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingMetrics:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        pending: PendingMetrics = self.step.evaluated(partial, signals)
        return pending

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them."""
        with peer_errors():
            pending: PendingMetrics = self.step.synchronize()
        return pending

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order."""
        fields = self._state.model.trainable_fields()
        trained = [(field.name, zlib.crc32(field.read().data)) for field in fields]
        return [*trained, *self.replica_state.checksums()]

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        """Collective. Load rank 0's portable state, or a part of it, into every worker."""
        self.step.scatter(state or {}, part)
        self.broadcast_state(0)
        if part is StatePart.ALL:
            self._state.distribute(state)

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread."""
        self._state.check()
        with peer_errors():
            kept = self.parts.reducer.state()
        is_root = self.workers.rank == 0
        pending: PendingState | None = self._state.gather(
            kept | self._state_of_layers(is_root), spool, is_root=is_root
        )
        return pending

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

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved."""
        error = self._state_tensors.take_back()
        with peer_errors():
            return self.replica_state.combine(error)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has the moving average of its weights, if any."""
        found: AbstractContextManager[None] = self.parts.ema.in_model()
        return found

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local."""
        self.step.forget()
        self.parts.computation.evaluation.begin()
        self.parts.clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker."""
        wrap = self.parts.computation.wrap
        with self._all_kept():
            for one in self._forms(batch):
                self.train_step(wrap(one), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(wrap(eval_batch))
        self.enter_world()

    def recorder(self) -> StepRecorder:
        """Return what records this worker's steps. Local: no collective."""
        found: StepRecorder = self._recorder(self.parts.clock)
        return found

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local."""
        held: str = self._files.load_weights_file(self.model, path)
        self.parts.ema.restart()
        return held

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        found: dict[str, NDArray[Any]] = self.parts.computation.predict(batch)
        return found

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective."""
        self.parts.clock.restart()

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since the last step. Local: no collective."""
        change: Change = self.parts.trained_set.change()
        return change

    def _take(self, parts: Any) -> None:
        """Take the parts of a step, at first and when others are trained."""
        self.parts, self.optimizers = parts, self._optimizers_of(parts)
        self.step.attach(parts)
        self._state = self.step.make_state()

    def _forms(self, batch: HostBatch) -> list[HostBatch]:
        """Return a batch in each form that a step is compiled for."""
        return [batch]


def follow_trained(backend: Backend, config: Config, step: int) -> str:
    """Collective. Let the next step follow what callbacks have frozen or thawed; return a note of it."""
    workers, change = backend.workers, backend.trained_change()
    gathered = workers.allgather_object((workers.host, change))
    if not any(any(of_rank) for _, of_rank in gathered):
        return ""
    if (error := refused_change(gathered, config, workers.is_elastic)) is not None:
        raise error
    return describe_change(change, step, backend.follow_trained())


def check_replicas(backend: Backend) -> None:
    """Collective. Check that every worker holds the same model, by one small checksum."""
    workers = backend.workers
    if workers.size == 1:
        return
    checksums = backend.parameter_checksums()
    digest = blake2b(repr(checksums).encode(), digest_size=16).digest()
    digests = workers.allgather_object(digest)
    if len(set(digests)) == 1:
        return
    everyone = workers.allgather_object((workers.host, checksums))
    # of a split model, workers have other parameters
    having: dict[str, dict[int, int]] = {}
    for rank, (_, of_rank) in enumerate(everyone):
        for name, crc in of_rank:
            having.setdefault(name, {})[rank] = crc
    usual = {name: Counter(found.values()).most_common(1)[0][0] for name, found in having.items()}
    differing = {name: found for name, found in having.items() if len(set(found.values())) > 1}
    explained = backend.replica_state.explain({name: set(crcs.values()) for name, crcs in differing.items()})
    differing = {name: found for name, found in differing.items() if name not in explained}
    if not differing:
        return
    drifted = sorted(
        {r for name, found in differing.items() for r, crc in found.items() if crc != usual[name]}
    )
    parameter = next(
        name for name, found in differing.items() if found.get(drifted[0], usual[name]) != usual[name]
    )
    ranks = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in drifted[:_RANKS_NAMED])
    raise ReplicaDriftError(
        f"the workers' parameters differ: {ranks} drifted from the others, first in {parameter}",
        "A worker computed something else: faulty memory, another library, or a task that changes it on its "
        "own. If training does so, name it in the task's state_reductions.",
        everywhere=True,
    )
