"""What every step computes of a batch: model, loss and metrics, seeds, and the sums of its samples."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from numpy.typing import NDArray

from hvdtrain.backends.objective.evaluation_metrics import Seen
from hvdtrain.backends.objective.losses import Values, Weighted, check_values
from hvdtrain.backends.objective.objective import REGULARIZATION_LOSS, ComputationBase, Objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.step_metrics import NO_SIGNALS, PartialSums, findings
from hvdtrain.backends.tensorflow import batches, functions, task_model
from hvdtrain.backends.tensorflow.export import TENSORS
from hvdtrain.backends.tensorflow.objective import losses as keras_losses
from hvdtrain.backends.tensorflow.objective.gathering import Gathering
from hvdtrain.backends.tensorflow.state.layer_state import LayerState
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_host_step

Tensor = Any
Batch = Mapping[str, Tensor]


class Computation(ComputationBase):
    """What the steps of a job compute of a batch on this worker."""

    model: keras.Model
    called: Any
    batch_norm: BatchNormSync
    precision: str
    layer_state: LayerState
    seed_states: list[Any]

    def __init__(self, task: Any, config: Config, workers: Workers) -> None:
        super().__init__(task, config, workers, keras_losses.FUNCTIONS, tf.cast)
        self.unused: list[str] = []
        is_local = config.sync_every is not None
        self.traced_workers = batches.TracedWorkers(workers)
        self.near: batches.Sized = Workers(workers.host) if is_local else self.traced_workers
        self.wrap = batches.BatchMaker(workers.is_elastic, is_local)
        # in training or not: whether padding is left out, as for losses that the model adds
        self.leaves_out: dict[bool, bool] = {True: True, False: True} if self.is_own_loss else {}
        self.gathering = Gathering(workers.most, config.compile)
        self._no_signals = tf.constant(NO_SIGNALS)

    @property
    def has_collectives(self) -> bool:
        """Whether the model itself has collectives."""
        return self.batch_norm.layers > 0 and self._workers.may_reduce

    def make_model(self) -> ModelState:
        """Make the task's model, changed as the config requests; return this worker's variables."""
        self.batch_norm = BatchNormSync(self.traced_workers)
        self.model = task_model.make_model(self.task, self.config, self.batch_norm)
        self.precision = task_model.precision_of(self.model, self.config.precision)
        self.called = task_model.cast_outputs_to_fp32(self.model, self.precision)
        self.seed_states = [v for v in self.model.variables if v.name == "seed_generator_state"]
        self.seed_states.append(global_seed_generator().state)  # of keras.random without a seed
        # of operations, when they are traced
        tf.random.set_seed(mix(self.config.seed, 0, self._workers.rank) >> 33)
        self.layer_state = LayerState(self.model)
        tensors = ModelState(self.model, Renaming(self.task, "tf"))
        self.wrap.float_bits = task_model.float_bits_of(self.model)
        return tensors

    def begin_step(self, step: int) -> None:
        """Do nothing: a step is given its seeds when it is called, and layers have no mode."""

    def seeds(self, step: int, *place: int) -> Tensor:
        """Return the states of the model's seed generators for one step, (generators, 2)."""
        numbers = range(len(self.seed_states))
        keys = [mix(self.config.seed, step, self._workers.rank, *place, i) for i in numbers]
        states = np.asarray([[key >> 32, 0] for key in keys], np.int64)
        return tf.convert_to_tensor(states.reshape(-1, 2))

    def set_seeds(self, seeds: Tensor) -> None:
        """Set the seed generators for a step; when it is traced, also what is drawn for its trace."""
        seed_host_step(mix(self.config.seed, self._workers.rank) >> 1)
        for i, state in enumerate(self.seed_states):
            state.assign(seeds[i])

    def numbers(self, signals: Sequence[float]) -> Tensor:
        """Return what this worker sends to all with the sums of a step, as a tensor."""
        return self._no_signals if signals is NO_SIGNALS else tf.constant(signals, tf.float32)

    def learnt(self) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
        """Return the names that were learnt when a step was traced last."""
        return self.names, self.weighted, self.unused

    def counts_of(self, batch: batches.TensorFlowBatch, training: bool) -> tuple[int, ...]:
        """Return how many samples of each micro-batch a step is given; none if it is given all."""
        if batch.counts and training not in self.leaves_out:

            def traced(arrays: Any, weights: Tensor) -> Tensor:
                if len(weights.shape) > 1:  # several micro-batches
                    arrays, weights = tf.nest.map_structure(lambda a: a[0], (arrays, weights))
                return self.per_sample(arrays, weights, training).rows

            tf.function(traced, autograph=False).get_concrete_function(batch.arrays, batch.weights)
        return batch.counts if self.leaves_out.get(training) else ()

    def counted(
        self, batch: batches.TensorFlowBatch, place: int = 0, training: bool | None = None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return a micro-batch with weights and gradient weights, without padding, if need be of a phase."""
        parts = (batch.arrays, batch.weights, batch.gradient_weights)
        if len(batch.weights.shape) > 1:  # several micro-batches
            parts = tf.nest.map_structure(lambda a: a[place], parts)
        counts = batch.counts[place : place + 1] if training is None or self.leaves_out.get(training) else ()
        return functions.of_counted(counts, lambda *counted: counted)(*parts)

    def per_sample(
        self, micro_batch: Batch, weights: Tensor, training: bool, objective: Objective | None = None
    ) -> Values[Tensor]:
        """Collective if the objective gathers. Return losses and all values of a micro-batch's samples."""
        given = self.given(micro_batch, weights, training, objective)
        check_values(given, weights.shape[0])
        self.names = tuple(given)
        self.weighted = tuple(name for name, value in given.items() if isinstance(value, Weighted))
        return keras_losses.weigh(given, tf.shape(weights)[0], weights.dtype)

    def given(
        self, micro_batch: Batch, weights: Tensor, training: bool, objective: Objective | None = None
    ) -> dict[str, Any]:
        """Collective if the objective gathers. Return what it gives: the loss, the first, and the metrics."""
        self.batch_norm.weights = weights
        chosen = objective or (self.train_objective if training else self.eval_objective)
        phase = functions.Phase(self.called, training)
        among = self.gathering.among(self.near if training else self.traced_workers, weights)
        with functions.phase_of_layers(training), among:
            losses, metrics = chosen(phase, micro_batch)
        if (added := phase.added_loss()) is not None:
            if REGULARIZATION_LOSS in (*metrics, *self.evaluation.order):
                raise TaskError(
                    f"the task has a metric {REGULARIZATION_LOSS!r}; hvdtrain logs the model's own losses "
                    "under this name",
                    "Give the metric another name.",
                )
            losses = functions.add_to_loss(losses, added)
            metrics = {**metrics, REGULARIZATION_LOSS: tf.fill(tf.shape(weights)[:1], added)}
        if not self.is_own_loss:
            self.leaves_out[training] = phase.has_losses_of_calls
        return {"loss": losses, **metrics}

    def trace(self) -> None:
        """Let evaluation and prediction be traced anew, when the next batch comes."""
        if self.config.compile:
            task_model.check_compiler(self._workers.host)
        evaluate = task_model.compiled(self._eval_sums) if self.config.compile else self._eval_sums
        self._eval_function = cache(
            lambda counts: functions.Compiled(functions.of_counted(counts, evaluate), self.learnt)
        )

        def predict(arrays: Batch) -> dict[str, Tensor]:
            return self.serving.predicted(functions.Phase(self.called, training=False), arrays, TENSORS)

        self._predict_function = functions.Compiled(predict, lambda: None)

    def evaluate(self, batch: batches.TensorFlowBatch, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        counts = self.counts_of(batch, training=False)
        function = self._eval_function(counts)
        if partial is None:
            self.evaluation.begin()
        with peer_errors():
            (sums, seen), (names, weighted, _) = function(batch, batch.arrays, batch.weights)
        if self.evaluation:
            count = counts[0] if counts else batch.samples.weights.shape[1]
            self.evaluation.add(keras_losses.masks_within(*seen), batch.samples.rows(0, count))
        if partial is None:
            return PartialSums(names, weighted, sums, batch.total_weight)
        weight = partial.weight + batch.total_weight
        return PartialSums(names, weighted, partial.values + sums, weight)

    def summed(self, values: Tensor, signals: Sequence[float]) -> Tensor:
        """Collective. Return the vector of an evaluation, summed over workers, of this worker's sums."""
        vector = functions.joined(values, findings(), self.numbers(signals))
        if self._workers.size > 1:
            with peer_errors():
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return vector

    def predict(self, batch: batches.TensorFlowBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        with self.gathering.alone():
            outputs, _ = self._predict_function(batch, batch.arrays)
        return {name: keras_losses.to_numpy(tensor) for name, tensor in outputs.items()}

    def _eval_sums(self, arrays: Any, weights: Tensor) -> tuple[Tensor, Seen]:
        rows = self.per_sample(arrays, weights, training=False).rows
        return tf.linalg.matvec(rows, weights), self.evaluation.take()

    def _watch(self, outputs: Any, batch: Batch) -> None:
        super()._watch(outputs, keras_losses.masks_beside(outputs, batch))
