"""TensorFlow / Keras 3 behind the Backend protocol, over ``horovod.tensorflow``."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, ModelFiles, PendingState
from hvdtrain.backends.common import CommonBackend
from hvdtrain.backends.records import (
    BackendInfo,
    DeviceMemory,
    DryRun,
    Exported,
    ModelInfo,
)
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.start import start_horovod
from hvdtrain.backends.steps import choose_step
from hvdtrain.backends.tensorflow import probes
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch
from hvdtrain.backends.tensorflow.export import export_model, load_weights_file, plain_model
from hvdtrain.backends.tensorflow.functions import with_micro_batches
from hvdtrain.backends.tensorflow.objective.metric_objects import HorovodCollectives
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.replica_state import StateTensors
from hvdtrain.backends.tensorflow.state.moving_state import MovingState
from hvdtrain.backends.tensorflow.step_clock import ProfilerRecorder
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.parts import Parts, describe_parts, make_parts, renewed_parts
from hvdtrain.backends.tensorflow.task_model import (
    device_memory,
    device_name,
    use_device,
    without_loss,
)
from hvdtrain.backends.trained_set import not_in_own_step
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import EnvironmentFault
from hvdtrain.workers.agreement import Workers

# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6
_LARGE_BYTES = 1 << 24


def start(config: Config, membership: Membership | None = None) -> "TensorFlowBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads."""
    if keras.backend.backend() != "tensorflow":
        raise EnvironmentFault(
            f"Keras was imported with the {keras.backend.backend()} backend before hvdtrain started",
            "Set KERAS_BACKEND=tensorflow, or import keras only inside the task's methods.",
        )
    workers = start_horovod(hvd, HorovodCollectives(), membership, has_groups=config.stages > 1)
    return TensorFlowBackend(workers, use_device(config, workers))


class TensorFlowBackend(CommonBackend):
    """The TensorFlow backend of one worker.

    Attributes:
        model: the task's model, or the layers of this worker's stage, after ``build``.
    """

    _built_bytes = 0  # of the parameters of the model that this process built before
    model: keras.Model
    parts: Parts
    _state: TrainingState

    def __init__(self, workers: Workers, device: str) -> None:
        self.workers: Workers = workers
        description = f"TensorFlow {tf.__version__} (Keras {keras.__version__}) on {device_name(device)}"
        self.info = BackendInfo(description, {"tensorflow": tf.__version__, "keras": keras.__version__})
        self._is_cpu = device == "CPU"

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and compiled steps, with initial values. Collective if it is split."""
        # automatic names of layers start anew, equal on all workers; only a large earlier model is worth the
        # time of a garbage collection, and `start` refuses a process that has used TensorFlow before
        policy = keras.config.dtype_policy()  # a session's, and the user's
        keras.utils.clear_session(free_memory=TensorFlowBackend._built_bytes > _LARGE_BYTES)
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(mix(config.seed, 0) >> 33)
        self.step = step = choose_step(task, config)(task, config, self.workers)
        self._take(parts := make_parts(step, task, config, batch, self._is_cpu))
        self.model = parts.computation.model
        TensorFlowBackend._built_bytes = sum(4 * math.prod(one.shape) for one in self.model.variables)
        self.weight_shapes = step.weight_shapes(self._state.weight_shapes())
        self._state_tensors = StateTensors(self.model, parts.tensors)
        replicas, collectives = step.replicas()
        self.replica_state = ReplicaState(
            task, replicas, collectives, self._state_tensors, replicas is self.workers
        )
        self._moving = MovingState(self.model, step.changed_early()) if self.workers.is_elastic else None
        if config.initial_parameters == "portable":
            self._state.load_initial(config.seed)
        info: ModelInfo = step.describe(describe_parts(step, parts))
        return info

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TensorFlowBatch]:
        """Yield the device batches that the steps take, one ahead of the host's."""
        wrap = self.parts.computation.wrap
        ahead: TensorFlowBatch | None = None
        for batch in batches:
            if ahead is not None:
                yield ahead
            ahead = wrap(batch)
        if ahead is not None:
            yield ahead

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state."""
        return probes.dry_run(self.step, self._state_tensors, batch, training)

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        return None if self._is_cpu else device_memory()

    def recorder(self) -> ProfilerRecorder:
        """Return what records this worker's steps. Local: no collective."""
        return ProfilerRecorder(self.parts.clock)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has the moving average of its weights, if any."""
        return self.parts.ema.in_model()

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved."""
        with peer_errors():
            return self.replica_state.combine()

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what is trainable now, or what a checkpoint keeps; return how many numbers. Local."""
        if not self.step.follows_trained:
            raise not_in_own_step()
        before = {name: array for name, array in self._state.arrays() if not name.startswith("model/")}
        self._take(renewed_parts(self.parts, kept))
        now = dict(self._state.arrays())
        self._state.load({**now, **{name: before[name] for name in now.keys() & before.keys()}})
        return sum(math.prod(field.shape) for field in self.parts.trainable)

    def undone_step(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it."""
        with self._all_kept():
            self.train_step(batch, learning_rate, signals)

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        if not self.step.follows_trained:
            return None
        return self.parts.trained_set.state(optimized=self.parts.optimized)

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread."""
        is_root = self.workers.rank == 0
        with peer_errors():
            kept = self.parts.reducer.state()
        if is_root:
            kept = kept | self.parts.computation.layer_state.read()
        return self._state.gather(kept, spool, is_root=is_root)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        self.replica_state.restart()
        if self.workers.size == 1:
            return
        with peer_errors():
            if self.workers.is_elastic:
                self.replica_state.follow(self.workers, root)
            self.step.broadcast(root)

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local."""
        self.parts.computation.traced_workers.enter_world()
        self.step.forget()
        self.parts.computation.evaluation.begin()
        self.parts.clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker."""
        wrap = self.parts.computation.wrap
        # with a constant global batch, fewer workers have more micro-batches
        varies = self.workers.is_elastic and self.parts.config.global_batch_size is not None
        batches = [with_micro_batches(batch, number) for number in (1, 2)] if varies else [batch]
        with self._all_kept():
            for one in batches:
                self.train_step(wrap(one), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(wrap(eval_batch))
        self.enter_world()

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local."""
        computation = self.parts.computation
        with computation.gathering.alone(), without_loss(self.model):
            return export_model(
                self.model, computation.objective, format_name, path, batches, computation.serve
            )

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local."""
        with without_loss(self.model):
            held = load_weights_file(self.model, path)
        self.parts.ema.restart()
        return held

    def predict(self, batch: TensorFlowBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        return self.parts.computation.predict(batch)

    def plain_model(self) -> keras.Model:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        return plain_model(self.model)

    def _take(self, parts: Parts) -> None:
        """Take the parts of a step, at first and when others are trained."""
        self.parts, self.optimizers = parts, [one for one, _ in parts.named.values()]
        self.step.attach(parts)
        self._state = self.step.make_state()

    def _all_kept(self) -> AbstractContextManager[None]:
        """Return a context after which everything that steps change is as it was."""
        parts = self.parts
        return state_kept(self.model, [*parts.slots, *parts.ema.to_broadcast(), *parts.scale_variables])


_backend: type[Backend] = TensorFlowBackend
_files: type[ModelFiles] = TensorFlowBackend
