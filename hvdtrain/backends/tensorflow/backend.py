"""TensorFlow / Keras 3 behind the Backend interface, over ``horovod.tensorflow``.

With its parts (``_keras_*.py``) the only place that imports tensorflow and keras. ``torch.py`` has
the same names in the same order.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hvdtrain.quiet import quiet_stderr

os.environ["KERAS_BACKEND"] = "tensorflow"  # read when keras is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with quiet_stderr():  # TensorFlow's native start-up notices
    import tensorflow as tf
import horovod.tensorflow as hvd
import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends import _keras_export
from hvdtrain.backends._exchange import Exported
from hvdtrain.backends._keras_averages import Averages
from hvdtrain.backends._keras_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends._keras_batches import KerasBatch, KerasPending
from hvdtrain.backends._keras_calls import Compiled, Phase
from hvdtrain.backends._keras_choice import choose_optimizer
from hvdtrain.backends._keras_compile import check_compiler, compile_step
from hvdtrain.backends._keras_losses import NAMED
from hvdtrain.backends._keras_optimizers import DistributedOptimizer
from hvdtrain.backends._keras_precision import LossScale, computing, widen_outputs
from hvdtrain.backends._keras_recompute import recompute_blocks
from hvdtrain.backends._keras_slots import TrainingState
from hvdtrain.backends._keras_state import KerasSnapshot, ModelState
from hvdtrain.backends._names import Renaming
from hvdtrain.backends._objective import Objective, check_per_sample, make_objective
from hvdtrain.backends._precision import check_precision
from hvdtrain.backends._workers import HorovodWorkers, peer_errors
from hvdtrain.backends.base import NO_REQUESTS, NUMBERS_AFTER_SUMS, PortableState, Requests
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.errors import EnvironmentFault, TaskError
from hvdtrain.threads import threads_per_worker

Tensor = Any


def start(config: Config) -> "TensorFlowBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Raises:
        EnvironmentFault: where the device is missing, Keras runs on another framework, TensorFlow
            was used already or the launcher does not fit.
    """
    if keras.backend.backend() != "tensorflow":
        raise EnvironmentFault(
            f"Keras was imported with the {keras.backend.backend()} backend before hvdtrain started",
            "Set KERAS_BACKEND=tensorflow, or import keras only inside the task's methods.",
        )
    hvd.init()
    workers = HorovodWorkers(hvd)
    threads = config.threads or threads_per_worker(workers.local_size)
    try:
        device = _choose_device(config.device, workers)
        check_precision(config.precision, device == "GPU", workers.host)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if device == "CPU":
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"TensorFlow was used before hvdtrain could choose its device and threads: {error}",
            "Use TensorFlow only inside the task's methods, or after hvdtrain.train().",
        ) from None
    return TensorFlowBackend(workers, device)


def _choose_device(wanted: str, workers: HorovodWorkers) -> str:
    cards = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted == "auto" and not cards):
        tf.config.set_visible_devices([], "GPU")
        return "CPU"
    if not cards:
        raise EnvironmentFault(
            f"--device gpu: TensorFlow {tf.__version__} sees no GPU on {workers.host}",
            "Use --device cpu, or install a driver and TensorFlow with CUDA.",
        )
    if workers.local_rank >= len(cards):
        raise EnvironmentFault(
            f"{workers.host} has {len(cards)} GPUs for {workers.local_size} workers; each worker needs one",
            f"Start at most {len(cards)} workers on this host, or use --device cpu.",
        )
    tf.config.set_visible_devices(cards[workers.local_rank], "GPU")
    tf.config.experimental.set_memory_growth(cards[workers.local_rank], True)
    return "GPU"


class TensorFlowBackend:
    """The TensorFlow backend of one worker.

    Args:
        workers: the job's workers.
        device: "CPU" or "GPU", where this worker computes.
    """

    def __init__(self, workers: HorovodWorkers, device: str) -> None:
        self.workers = workers
        self._device = device
        self._sums: Tensor | None = None
        self._weight = 0.0
        self._names: tuple[str, ...] = ()
        self._missing: list[str] = []
        self._none_asked = tf.constant(NO_REQUESTS.as_numbers())
        self._known_weights: tuple[NDArray[Any], tuple[Tensor, Tensor]] | None = None

    def describe(self) -> str:
        """Say framework, version and device."""
        on = "the CPU"
        if self._device == "GPU":
            on = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])[
                "device_name"
            ]
        return f"TensorFlow {tf.__version__} (Keras {keras.__version__}) on {on}"

    def versions(self) -> dict[str, str]:
        """Give the versions that must be equal on all workers."""
        return {"tensorflow": tf.__version__, "keras": keras.__version__}

    def build(self, task: Any, config: Config, accumulate: int) -> None:
        """Build model, optimizer and compiled steps. Local: no collective."""
        keras.utils.clear_session()  # automatic names of layers start anew, equal on all workers
        keras.utils.set_random_seed(mix(config.seed, 0) >> 33)
        self._seed = config.seed
        self._accumulate = accumulate
        self._objective: Objective = make_objective(task, "tf", NAMED)
        self._train_objective = make_objective(task, "tf", NAMED, config.label_smoothing)
        with computing(config.precision):
            self._model = task.tf_model()
        if not isinstance(self._model, keras.Model):
            raise TaskError(f"tf_model() must give a keras.Model, found {type(self._model).__name__}")
        if not self._model.built:
            raise TaskError(
                "tf_model() gave a model without weights yet", "Call it on sample inputs once, or build() it."
            )
        self._batch_norm = BatchNormSync(self.workers.size)
        if config.sync_batch_norm:
            self._batch_norm.take_over(self._model)
        if config.checkpoint_activations:
            recompute_blocks(self._model)
        self._called = widen_outputs(self._model, config.precision)
        self._scale = LossScale() if config.precision == "fp16" else None
        tensors = ModelState(self._model, Renaming(task, "tf"))
        self._trainable = [entry for entry in tensors.entries if entry.trainable]
        if not self._trainable:
            raise TaskError("the model has no trainable variable")
        self._parameters = [entry.variable for entry in self._trainable]
        self._optimizer = DistributedOptimizer(
            choose_optimizer(task, config, tensors),
            compression=config.compression,
            clip_norm=config.clip_norm,
            loss_scale=self._scale,
        )
        self._optimizer.build(self._parameters)
        self._averages = Averages(tensors, config.ema_decay)
        self._state = TrainingState(tensors, self._optimizer.inner, self._averages)
        self._seed_states = [v for v in self._model.variables if v.name == "seed_generator_state"]
        self._gradients: Callable[..., tuple[list[Tensor], Tensor]] = self._gradients_of
        evaluate = self._compiled_eval_step
        if config.compile:  # the parts without a collective
            check_compiler(self.workers.host)
            self._gradients, evaluate = compile_step(self._gradients), compile_step(evaluate)
        self._train_function = Compiled(self._compiled_train_step)
        self._eval_function = Compiled(evaluate)

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[KerasBatch]:
        """Turn batches in host memory into device batches, one ahead."""
        ahead: KerasBatch | None = None
        for batch in batches:
            if ahead is not None:
                yield ahead
            ahead = self._wrap(batch)
        if ahead is not None:
            yield ahead

    def train_step(self, batch: KerasBatch, learning_rate: float, requests: Requests = NO_REQUESTS) -> None:
        """Collective. One optimizer update with the mean gradient over the global batch."""
        rate = tf.constant(learning_rate, tf.float32)  # a Python number would compile the step anew
        with peer_errors():
            sums = self._train_function(
                batch.signature,
                batch.arrays,
                batch.weights,
                batch.gradient_weights,
                rate,
                self._averages.share(batch.step + 1),
                self._seeds(batch.step),
                self._none_asked if requests is NO_REQUESTS else tf.constant(requests.as_numbers()),
            )
        self._add(sums, batch.total_weight)

    def eval_step(self, batch: KerasBatch) -> None:
        """Evaluate one batch. Local: no collective."""
        self._add(self._eval_function(batch.signature, batch.arrays, batch.weights), batch.total_weight)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give a context in which the model computes with the average of its weights, if it has one."""
        return self._averages.in_model()

    def take_metrics(self, phase: str, requests: Requests = NO_REQUESTS) -> KerasPending:
        """Collective. Take what the steps since the last call added up to."""
        sums, weight = self._sums, self._weight
        assert sums is not None  # called after at least one step
        if requests is not NO_REQUESTS:
            sums = sums + tf.constant(requests.at_the_end_of(len(sums)))
        if phase == "eval" and self.workers.size > 1:
            with peer_errors():
                sums = hvd.allreduce(sums, op=hvd.Sum, name="hvdtrain.eval_metrics")
        self._sums, self._weight = None, 0.0
        return KerasPending(self._names, sums, weight)

    def parameters(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Give the trainable parameters of this worker by portable name."""
        for entry in self._trainable:
            yield entry.name, entry.read()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the trainable parameters by portable name."""
        return {entry.name: entry.shape for entry in self._trainable}

    def batch_norm_layers(self) -> int:
        """Give the number of the model's batch-norm layers."""
        return len(find_batch_norms(self._model))

    def missing_gradient_names(self) -> list[str]:
        """Name the parameters that got no gradient on this worker when last there were some."""
        return self._missing

    def average_statistics(self) -> None:
        """Collective. Average the moving statistics (batch norm) over workers."""
        if self.workers.size == 1:
            return
        with peer_errors():
            for entry in self._state.model.entries:
                if not entry.trainable and tf.as_dtype(entry.variable.dtype).is_floating:
                    name = f"hvdtrain.statistics.{entry.path}"
                    entry.variable.assign(hvd.allreduce(entry.variable.value, op=hvd.Average, name=name))

    def snapshot(self) -> KerasSnapshot:
        """Copy model and optimizer of this worker off the device, for another thread to read."""
        return self._state.snapshot()

    def get_state(self) -> PortableState:
        """Give model and optimizer of this worker as portable state."""
        return self.snapshot().read()

    def set_state(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer."""
        self._state.load(state)

    def broadcast_state(self, root: int) -> None:
        """Collective. Give every worker the root's optimizer state, parameters and buffers."""
        if self.workers.size == 1:
            return
        with peer_errors():
            # given Keras variables, Horovod fails on a method that Keras 3 does not have
            hvd.broadcast_variables([v.value for v in self._optimizer.variables], root)
            hvd.broadcast_variables([entry.variable.value for entry in self._state.model.entries], root)
            hvd.broadcast_variables(self._averages.variables(), root)

    def export(self, form: str, path: Path, batch: HostBatch) -> Exported:
        """Write the model in a form that others serve, load it back and compare outputs."""
        return _keras_export.export_model(self._model, self._objective, form, path, batch)

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; say what it held."""
        held = _keras_export.load_weights_file(self._model, path)
        self._averages.restart()
        return held

    def close(self) -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def _wrap(self, batch: HostBatch) -> KerasBatch:
        one = len(batch.weights) == 1
        weights, gradient_weights = self._weigh(batch, one)
        return KerasBatch(
            step=batch.step,
            arrays={name: tf.constant(a[0] if one else a) for name, a in batch.arrays.items()},
            weights=weights,
            gradient_weights=gradient_weights,
            total_weight=batch.total_weight,
            signature=tuple((a.shape, a.dtype) for a in batch.arrays.values()),
        )

    def _weigh(self, batch: HostBatch, one: bool) -> tuple[Tensor, Tensor]:
        """Give weights and gradient weights; those of the batch before where they are the same."""
        known = self._known_weights
        if known is None or known[0] is not batch.weights:
            weights = batch.weights[0] if one else batch.weights
            scaled = weights * np.float32(self.workers.size / batch.total_weight)
            tensors = tf.constant(weights), tf.constant(scaled)
            known = self._known_weights = batch.weights, tensors
        return known[1]

    def _seeds(self, step: int) -> Tensor:
        """Give the states of the model's seed generators for one step, (generators, 2)."""
        if not self._seed_states:
            return None
        keys = [mix(self._seed, step, self.workers.rank, i) for i in range(len(self._seed_states))]
        return tf.convert_to_tensor(np.asarray([[key >> 32, 0] for key in keys], np.int64))

    def _compiled_train_step(  # noqa: PLR0917 - tensors, by position as a compiled step is called
        self,
        arrays: Any,
        weights: Tensor,
        gradient_weights: Tensor,
        learning_rate: Tensor,
        share: Tensor,
        seeds: Tensor,
        requests: Tensor,
    ) -> Tensor:
        for i, state in enumerate(self._seed_states):
            state.assign(seeds[i])
        self._optimizer.learning_rate.assign(learning_rate)
        if self._scale is not None:
            gradient_weights *= self._scale.value
        if self._accumulate == 1:
            gradients, sums = self._gradients(arrays, weights, gradient_weights)
        else:
            gradients, sums = self._accumulated_gradients(arrays, weights, gradient_weights)
        sums = tf.concat([sums, [float(len(self._missing))], requests], 0)
        if self.workers.size > 1:
            sums = hvd.allreduce(sums, op=hvd.Sum, name="hvdtrain.metrics")
        self._optimizer.apply(gradients, self._parameters)
        self._averages.update(share)
        return sums if self._scale is None else self._scale.spoil(sums)

    def _accumulated_gradients(
        self, arrays: Any, weights: Tensor, gradient_weights: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Sum the gradients of the micro-batches in a loop, so that the graph does not grow with them."""

        def gradients_of(i: Tensor) -> tuple[list[Tensor], Tensor]:
            micro_batch = {name: array[i] for name, array in arrays.items()}
            return self._gradients(micro_batch, weights[i], gradient_weights[i])

        def add(i: Tensor, gradients: list[Tensor], sums: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
            more, more_sums = gradients_of(i)
            return i + 1, [a + b for a, b in zip(gradients, more, strict=True)], sums + more_sums

        gradients, sums = gradients_of(tf.constant(0))
        # one at a time: the next would move the same statistics, under the same names between workers
        _, gradients, sums = tf.while_loop(
            lambda i, *_: i < self._accumulate, add, (tf.constant(1), gradients, sums), parallel_iterations=1
        )
        return gradients, sums

    def _gradients_of(
        self, micro_batch: Any, weights: Tensor, gradient_weights: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Give one micro-batch's part of the gradient and the weighted sums of its values."""
        self._batch_norm.weights = weights
        with tf.GradientTape() as tape:
            losses, values = self._per_sample(micro_batch, training=True)
        gradients = tape.gradient(losses, [v.value for v in self._parameters], gradient_weights)
        # traced once: which variables the graph reaches does not change from step to step
        self._missing = [
            entry.name for entry, gradient in zip(self._trainable, gradients, strict=True) if gradient is None
        ]
        dense = self._optimizer.dense(gradients, self._parameters)
        return dense, tf.linalg.matvec(values, weights)

    def _compiled_eval_step(self, arrays: Any, weights: Tensor) -> Tensor:
        _, values = self._per_sample(arrays, training=False)
        return tf.concat([tf.linalg.matvec(values, weights), NUMBERS_AFTER_SUMS * [0.0]], 0)

    def _per_sample(self, micro_batch: Mapping[str, Tensor], training: bool) -> tuple[Tensor, Tensor]:
        """Give the losses (samples,) and all values (1 + metrics, samples)."""
        objective = self._train_objective if training else self._objective
        losses, metrics = objective(Phase(self._called, training), micro_batch)
        samples = next(iter(micro_batch.values())).shape[0]
        for name, value in (("the loss", losses), *metrics.items()):
            check_per_sample(name, tuple(value.shape), samples)
        self._names = ("loss", *metrics)
        casted = [tf.cast(value, tf.float32) for value in (losses, *metrics.values())]
        return casted[0], tf.stack(casted)

    def _add(self, sums: Tensor, weight: float) -> None:
        self._sums = sums if self._sums is None else self._sums + sums
        self._weight += weight
