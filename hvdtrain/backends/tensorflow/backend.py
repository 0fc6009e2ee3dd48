"""TensorFlow / Keras 3 behind the seam, ``Backend``, over ``horovod.tensorflow``."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.backends.base import Backend
from hvdtrain.backends.records import BackendInfo, DeviceMemory, Exported, PortableState
from hvdtrain.backends.steps import choose_step
from hvdtrain.backends.tensorflow import export, probes, task_model
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch
from hvdtrain.backends.tensorflow.functions import with_micro_batches
from hvdtrain.backends.tensorflow.objective.gathering import COLLECTIVES
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.replica_state import StateTensors
from hvdtrain.backends.tensorflow.state.moving_state import MovingState
from hvdtrain.backends.tensorflow.step_clock import ProfilerRecorder
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.plain_step import Parts
from hvdtrain.backends.workers import start_horovod
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import EnvironmentFault
from hvdtrain.workers.agreement import Workers

_LARGE_BYTES = 1 << 24


def start(config: Config, membership: Membership | None = None) -> "TensorFlowBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads."""
    if keras.backend.backend() != "tensorflow":
        raise EnvironmentFault(
            f"Keras was imported with the {keras.backend.backend()} backend before hvdtrain started",
            "Set KERAS_BACKEND=tensorflow, or import keras only inside the task's methods.",
        )
    workers = start_horovod(hvd, COLLECTIVES(), membership, has_groups=config.stages > 1)
    return TensorFlowBackend(workers, task_model.use_device(config, workers))


class TensorFlowBackend(Backend):
    """The TensorFlow backend of one worker."""

    _built_bytes = 0  # of the parameters of the model that this process built before
    model: keras.Model
    parts: Parts
    _state: TrainingState
    _hvd, _probes, _files = hvd, probes, export
    _recorder, _untrained = ProfilerRecorder, StateTensors

    def __init__(self, workers: Workers, device: str) -> None:
        self.workers: Workers = workers
        on = task_model.device_name(device)
        description = f"TensorFlow {tf.__version__} (Keras {keras.__version__}) on {on}"
        self.info = BackendInfo(description, {"tensorflow": tf.__version__, "keras": keras.__version__})
        self._is_cpu = device == "CPU"

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TensorFlowBatch]:
        wrap = self.parts.computation.wrap
        return (wrap(batch) for batch, _ in pairwise(chain(batches, (None,))))

    def device_memory(self) -> DeviceMemory | None:
        return None if self._is_cpu else task_model.device_memory()

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        before = {name: array for name, array in self._state.arrays() if not name.startswith("model/")}
        self._take(self.parts.renewed(kept))
        now = dict(self._state.arrays())
        self._state.load({**now, **{name: before[name] for name in now.keys() & before.keys()}})
        return sum(math.prod(field.shape) for field in self.parts.trainable)

    def undone_step(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> None:
        with self._all_kept():
            self.train_step(batch, learning_rate, signals)

    def enter_world(self) -> None:
        self.parts.computation.traced_workers.enter_world()
        super().enter_world()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        computation = self.parts.computation
        with computation.gathering.alone(), task_model.without_loss(self.model):
            return export.export_model(self.model, computation.serving, format_name, path, batches)

    def plain_model(self) -> keras.Model:
        task_model.take_loss(self.model)
        return self.model

    def _make(self, task: Any, config: Config, batch: HostBatch | None) -> Parts:
        # automatic names of layers start anew, equal on all workers; only a large earlier model is worth the
        # time of a garbage collection, and `start` refuses a process that has used TensorFlow before
        policy = keras.config.dtype_policy()  # a session's, and the user's
        keras.utils.clear_session(free_memory=TensorFlowBackend._built_bytes > _LARGE_BYTES)
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(mix(config.seed, 0) >> 33)
        self.step = choose_step(task, config)(task, config, self.workers)
        parts = Parts(self.step, task, config, batch, self._is_cpu)
        variables = parts.computation.model.variables
        TensorFlowBackend._built_bytes = sum(4 * math.prod(one.shape) for one in variables)
        return parts

    def _moving_state(self, changed_early: Sequence[Any] = ()) -> MovingState | None:
        return MovingState(self.model, changed_early) if self.workers.is_elastic else None

    def _state_of_layers(self, is_root: bool) -> PortableState:
        return self.parts.computation.layer_state.read() if is_root else {}

    def _forms(self, batch: HostBatch) -> list[HostBatch]:
        # with a constant global batch, fewer workers have more micro-batches
        varies = self.workers.is_elastic and self.parts.config.global_batch_size is not None
        return [with_micro_batches(batch, number) for number in (1, 2)] if varies else [batch]

    def _all_kept(self) -> AbstractContextManager[object]:
        parts = self.parts
        return state_kept(self.model, [*parts.slots, *parts.ema.to_broadcast(), *parts.scale_variables])
