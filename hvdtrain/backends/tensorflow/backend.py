"""TensorFlow / Keras 3 behind the Backend protocol, over ``horovod.tensorflow``."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, ModelFiles, PendingState
from hvdtrain.backends.choice import Choice
from hvdtrain.backends.common import CommonBackend
from hvdtrain.backends.objective.counting import Weighted, sample_values
from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics, Seen
from hvdtrain.backends.objective.gathering import GivenArrays, find_comparing
from hvdtrain.backends.objective.logits import bad_target, check_foreign
from hvdtrain.backends.objective.objective import (
    REGULARIZATION_LOSS,
    Objective,
    check_free,
    has_own_values,
    make_objective,
    mixed,
)
from hvdtrain.backends.optimizers import MAIN, ParameterGroups, own_optimizer_method
from hvdtrain.backends.own_step import StepPart, describe_not_applied, notes_on_copies, own_step_of
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import (
    BackendInfo,
    DeviceMemory,
    DryRun,
    Exported,
    ModelInfo,
    OwnRates,
    PortableState,
    StepMemory,
)
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.reduction.local_steps import LoneWorker, describe_local_steps
from hvdtrain.backends.replica_state import Changes
from hvdtrain.backends.start import start_horovod
from hvdtrain.backends.step_metrics import FINDINGS, NO_SIGNALS, PartialSums, PendingVector
from hvdtrain.backends.tensorflow.activations import ActivationMeter
from hvdtrain.backends.tensorflow.batches import (
    BatchMaker,
    TensorFlowBatch,
    TensorFlowPending,
)
from hvdtrain.backends.tensorflow.dry_run import (
    Recorder,
    count_frozen,
    draws_noted,
    last_activation,
    seed_operations,
    state_kept,
)
from hvdtrain.backends.tensorflow.export import export_model, load_weights_file, plain_model
from hvdtrain.backends.tensorflow.functions import (
    Compiled,
    Phase,
    accumulated_gradients,
    add_to_loss,
    joined,
    native,
    of_counted,
    phase_of_layers,
    run_eagerly,
    with_micro_batches,
)
from hvdtrain.backends.tensorflow.objective.evaluation import FUNCTIONS, HorovodCollectives
from hvdtrain.backends.tensorflow.objective.gathering import Gathering
from hvdtrain.backends.tensorflow.objective.losses import (
    NAMED,
    Values,
    as_arrays,
    check_values,
    masks_beside,
    masks_within,
    weigh,
)
from hvdtrain.backends.tensorflow.precision import (
    LossScale,
    cast_outputs_to_fp32,
    check_scaled,
    float_bits_of,
    new_loss_scale,
    precision_of,
)
from hvdtrain.backends.tensorflow.program import predicted, to_numpy
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.reduction.local_steps import LocalSteps
from hvdtrain.backends.tensorflow.replica_state import StateTensors, TrainedSet
from hvdtrain.backends.tensorflow.state.ema import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.state.layer_state import LayerState
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.state.moving_state import MovingState
from hvdtrain.backends.tensorflow.step_clock import ProfilerRecorder, StepClock
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.optimizers import choose_optimizer
from hvdtrain.backends.tensorflow.steps.own_step import (
    NamedOptimizers,
    OwnStep,
    make_optimizers,
    take_rates,
)
from hvdtrain.backends.tensorflow.steps.sharded_optimizer import make_ema, shard_optimizer
from hvdtrain.backends.tensorflow.steps.sharded_parameters import make_shards
from hvdtrain.backends.tensorflow.steps.sharded_state import make_state
from hvdtrain.backends.tensorflow.steps.sharded_update import update_kind
from hvdtrain.backends.tensorflow.steps.step_number import CompiledByStep, StepNumber
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.tensorflow.task_model import (
    check_compiler,
    compiled,
    device_memory,
    device_name,
    make_model,
    unused_methods,
    use_device,
    without_loss,
)
from hvdtrain.backends.tensorflow.traced_workers import Sized, TracedWorkers
from hvdtrain.backends.trained_set import frozen_by_config, not_in_own_step
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import EnvironmentFault, PeerLostError, TaskError
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_host_step

Tensor = Any
# a micro-batch, its weights and gradient weights -> its part of the gradients, and its weighted sums
GradientsOf = Callable[..., tuple[list[Tensor], Tensor]]

# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6


def start(
    config: Config,
    membership: Membership | None = None,
    ranks: Sequence[int] = (),
    kind: "type[TensorFlowBackend] | None" = None,
) -> "TensorFlowBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Args:
        config: its ``device``, ``threads`` and ``stages`` are used.
        membership: this worker's part in an elastic job; None in other jobs.
        ranks: the ranks of MPI that make up the job, if others run something else; empty for all.
        kind: the class of the backend, if it is another one.

    Raises:
        EnvironmentFault: If the device is missing, Keras runs on another framework, TensorFlow
            was used already or the launcher does not fit.
    """
    if keras.backend.backend() != "tensorflow":
        raise EnvironmentFault(
            f"Keras was imported with the {keras.backend.backend()} backend before hvdtrain started",
            "Set KERAS_BACKEND=tensorflow, or import keras only inside the task's methods.",
        )
    workers = start_horovod(hvd, HorovodCollectives(), membership, ranks, has_groups=config.stages > 1)
    return (kind or TensorFlowBackend)(workers, use_device(config, workers))


class TensorFlowBackend(CommonBackend):
    """The TensorFlow backend of one worker.

    Args:
        workers: the job's workers.
        device: "CPU" or "GPU", where this worker computes.

    Attributes:
        model: the task's model after ``build``.
        optimizers: its optimizers after ``build``.
    """

    collectives, state_tensors, local_steps = HorovodCollectives, StateTensors, LocalSteps
    _has_built = False  # in this process
    model: keras.Model
    _state: TrainingState
    _trained_set: TrainedSet
    _ema: ExponentialMovingAverage
    _own_step: OwnStep | None
    _shapes: dict[str, tuple[int, ...]]  # of the trainable parameters, by portable name
    _called: Any  # the model, or what stands for it, as steps call it

    def __init__(self, workers: Workers, device: str) -> None:
        self.workers: Workers = workers
        description = f"TensorFlow {tf.__version__} (Keras {keras.__version__}) on {device_name(device)}"
        self.info = BackendInfo(description, {"tensorflow": tf.__version__, "keras": keras.__version__})
        self._is_cpu = device == "CPU"
        self._no_signals = tf.constant(NO_SIGNALS)

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and compiled steps, with initial values. Collective if it is split."""
        # automatic names of layers start anew, equal on all workers; only an earlier model is worth the
        # seconds of a garbage collection, and `start` refuses a process that has used TensorFlow before
        policy = keras.config.dtype_policy()  # a session's, and the user's
        keras.utils.clear_session(free_memory=TensorFlowBackend._has_built)
        keras.config.set_dtype_policy(policy)
        TensorFlowBackend._has_built = True
        keras.utils.set_random_seed(mix(config.seed, 0) >> 33)
        self._seed, self._config = config.seed, config
        # of the sums, of those with weights of their own, of parameters without gradient: as last traced
        self._names: tuple[str, ...] = ()
        self._weighted: tuple[str, ...] = ()
        self._unused: list[str] = []
        self._make_batches(config)
        step = own_step_of(task, config)
        self._make_objectives(task, config)
        tensors = self._make_model(task, config, batch)
        self._has_collectives = self._batch_norm.layers > 0 and self.workers.may_reduce  # the model itself
        self._wrap.float_bits = float_bits_of(self.model)
        method = own_optimizer_method(task, config)
        shapes = self._shapes
        groups = ParameterGroups(config, shapes, method)
        tensors.freeze(groups.frozen)
        trainable = list(tensors.trainable_fields())
        if not groups.options:
            raise TaskError("the model has no trainable variable")
        self._shards = make_shards(config, trainable, self.workers)
        chosen, own_rates, factors = self._make_optimizers(task, config, tensors, groups, method)
        self.optimizers = list(self._optimizers.values())
        if step is not None:
            check_scaled(self._precision, self.optimizers)
        self._ema = make_ema(tensors, config.ema_decay, self._shards)
        self._local: LocalSteps | None = None
        reducer, loss_scale = self._make_reducer(trainable, config)
        is_alone = not (self._batch_norm.layers or config.sync_every or config.stages > 1)
        measured = step is None and is_alone and self._is_cpu
        self._clock = StepClock(self._traced_workers, measured)
        self._own_step = None
        if step is not None:
            self._own_step = OwnStep(step, chosen, factors, config, workers=self._traced_workers)
        else:
            self._make_update(trainable, reducer, loss_scale, config)
            self._local = self._make_local_steps(tensors, method, config)
        self._state = self._make_state(tensors)
        self.weight_shapes = self._state.weight_shapes()
        self._make_replica_state(task)
        self._task, self._config = task, config
        self._trained_set = TrainedSet(self.model, tensors)
        self._moving = self._make_moving_state()
        self._compile(config)
        if config.initial_parameters == "portable":
            self._state.load_initial(config.seed)
        return ModelInfo(
            {name: shapes[name] for name in groups.options},
            len(find_batch_norms(self.model)),
            describe_local_steps(config) if config.sync_every else reducer.describe(),
            own_rates,
            notes=(*unused_methods(self.model), *notes_on_copies(step, self.workers.is_elastic)),
            groups=tuple(groups.lines),
            frozen_parameters=count_frozen(self.model),
            synchronized_layers=self._batch_norm.layers,
            slot_bytes=sum(math.prod(v.shape) * native(v).dtype.size for v in self._slots) if method else 0,
            float_bits=self._wrap.float_bits,
            leaves_out_padding=self._is_own_loss or step is not None,
        )

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TensorFlowBatch]:
        """Yield the device batches that the steps take, one ahead of the host's."""
        ahead: TensorFlowBatch | None = None
        for batch in batches:
            if ahead is not None:
                yield ahead
            ahead = self._wrap(batch)
        if ahead is not None:
            yield ahead

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state."""
        called = self._called
        recorder = self._called = Recorder(called)
        values: dict[str, NDArray[Any]] = {}
        error, meter, changes = None, ActivationMeter(self._is_cpu), Changes()
        draws: list[str] = []
        try:
            with peer_errors(), state_kept(self.model), meter, self._state_tensors.watched() as changes:
                values = self._dry_run(self._wrap(batch), training, meter, draws)
        except PeerLostError:
            raise
        except tf.errors.InvalidArgumentError as raised:
            error = bad_target(raised) or raised
        except Exception as raised:
            error = raised
        finally:
            self._called = called
        if self._own_step is not None:
            self._trained_set.look()
        skipped = self._own_step.not_applied() if training and self._own_step and not error else []
        last, note = last_activation(self.model), describe_not_applied(skipped)
        notes = [note, *(draws if training else ())]
        if recorder.is_masked and self._is_own_loss:
            notes.append(
                "the model's outputs have a Keras mask, which fit() applies to losses and metrics; functions "
                "of your own apply it themselves: outputs._keras_mask"
            )
        memory = meter.found() if error is None else StepMemory(0, largest=meter.largest())
        outputs = recorder.outputs
        note = "; ".join(filter(None, notes))
        found = changes.crcs, changes.refusal
        return DryRun(outputs, values, last, error, note, memory, *found, weighted=self._weighted)

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or "".

        It follows a dry run. The model is in evaluation, so that neither dropout nor batch norm is taken for
        the loss. Of a loss that gathers, and of a step of the task's own, nothing is said.
        """
        if self._gathering.is_used or (training and self._own_step is not None):
            return ""
        arrays, weights, _ = self._first_counted(self._wrap(batch), training)
        objective = self._train_objective if training else self._eval_objective

        def values_of(rows: NDArray[np.int64], seed: int) -> GivenArrays:
            chosen, its_weights = tf.nest.map_structure(lambda a: tf.gather(a, rows), (arrays, weights))
            with state_kept(self.model):
                seed_operations(seed)
                self._set_seeds(self._seeds(seed))
                seed_host_step(seed)
                given = self._given(chosen, its_weights, False, objective)
            return {name: as_arrays(value) for name, value in given.items()}

        tolerance = 1e-4 if self._precision == "fp32" else 3e-2
        with peer_errors():
            return find_comparing(values_of, len(weights), tolerance)

    def train_step(
        self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingVector:
        """Collective. Do one optimizer update with the mean gradient over the global batch."""
        # a Python number would compile the step anew, and TensorFlow keeps a scalar made of one for ever
        rate = tf.constant(np.asarray(learning_rate, np.float32))
        if self._moving is not None:
            self._moving.keep()
        if self._local is not None:
            self._local.begin()
        try:
            self._learn_form(batch, training=True)
            self._reducer.follow(batch.in_warmup)
            leaves_out = batch.is_padded and (self._own_step is not None or self._leaves_out[True])
            function = self._train_function(batch.counts if leaves_out else ())
            if not batch.reduced_weight:
                function = self._train_function_of_none
            seed_host_step(mix(self._seed, batch.step, self.workers.rank) >> 1)
            with peer_errors():
                vector, (names, weighted, unused) = function(
                    *(batch, batch.arrays, batch.weights, batch.gradient_weights, batch.total, rate),
                    *(self._ema.share(batch.step + 1), self._seeds(batch.step), self._numbers(signals)),
                )
        except BaseException:
            (self._own_step or self._update).begin()
            if self._moving is not None:
                self._moving.restore()
            raise
        if self._own_step is not None:
            self._trained_set.look()
        if self._local is not None:
            return self._local.add(batch, names, weighted, vector, unused)
        return TensorFlowPending(
            names,
            vector,
            batch.total_weight,
            unused,
            weighted,
            timed=self._clock.timed,
            workers=self.workers.size,
        )

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        return None if self._is_cpu else device_memory()

    def recorder(self) -> ProfilerRecorder:
        """Return what records this worker's steps. Local: no collective."""
        return ProfilerRecorder(self._clock)

    def eval_step(self, batch: TensorFlowBatch, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        self._learn_form(batch, training=False)
        leaves_out = batch.is_padded and self._leaves_out[False]
        function = self._eval_function(batch.counts if leaves_out else ())
        if partial is None:
            self._evaluation.begin()
        with peer_errors():
            (sums, seen), (names, weighted, _) = function(batch, batch.arrays, batch.weights)
        if self._evaluation:
            count = batch.counts[0] if leaves_out else batch.samples.weights.shape[1]
            self._evaluation.add(masks_within(*seen), batch.samples.rows(0, count))
        if partial is None:
            return PartialSums(names, weighted, sums, batch.total_weight)
        weight = partial.weight + batch.total_weight
        return PartialSums(names, weighted, partial.values + sums, weight)

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        vector = joined(partial.values, FINDINGS * [0.0], self._numbers(signals))
        if self.workers.size > 1:
            with peer_errors():
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return self._evaluated(partial.names, vector, partial.weight, partial.weighted)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has the moving average of its weights, if any."""
        return self._ema.in_model()

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved."""
        with peer_errors():
            return self.replica_state.combine()

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what is trainable now, or what a checkpoint keeps; return how many numbers. Local."""
        if self._own_step is not None:
            raise not_in_own_step()
        tensors, config = self._state.model, self._config
        before = {name: array for name, array in self._state.arrays() if not name.startswith("model/")}
        if kept is None:
            self._trained_set.optimize({id(v) for v in self._optimizers[MAIN]._trainable_variables})
        else:
            self._trained_set.follow(kept)
        shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        method = own_optimizer_method(self._task, config)
        groups = ParameterGroups(config, shapes, method)
        if groups.frozen:
            raise frozen_by_config(sorted(groups.frozen))
        self._make_optimizers(self._task, config, tensors, groups, method)
        self.optimizers = list(self._optimizers.values())
        self._ema = self._ema.renewed(tensors)
        self._trained_set.accept()
        trainable = list(tensors.trainable_fields())
        self._make_update(trainable, self._reducer, self._update.loss_scale, config)
        self._state = self._make_state(tensors)
        now = dict(self._state.arrays())
        self._state.load({**now, **{name: before[name] for name in now.keys() & before.keys()}})
        self._compile(config)
        return sum(math.prod(field.shape) for field in trainable)

    def undone_step(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it.

        The step was traced with that.
        """
        with self._all_kept():
            self.train_step(batch, learning_rate, signals)

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        if self._own_step is not None:
            return None
        return self._trained_set.state(optimized={id(v) for v in self._optimizers[MAIN]._trainable_variables})

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread."""
        kept = self._kept_by_compression() | (self._layer_state.read() if self.workers.rank == 0 else {})
        return self._state.gather(kept, spool, is_root=self.workers.rank == 0)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        self.replica_state.restart()
        if self.workers.size == 1:
            return
        with peer_errors():
            if self.workers.is_elastic:
                self.replica_state.follow(self.workers, root)
            variables = [field.variable for field in self._state.model.fields]
            averages = [
                *self._ema.to_broadcast(),
                *([] if self._local is None else self._local.to_broadcast()),
            ]
            broadcast_variables([*self._slots, *variables, *averages, *self._scale_variables()], root)
            self._ema.follow_broadcast()
            self._reducer.broadcast(root)
            if self._layer_state:
                state = self.workers.broadcast_object(self._layer_state.read(), root)
                self._load_layers(state)

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local."""
        self._traced_workers.enter_world()
        (self._own_step or self._update).begin()
        self._evaluation.begin()
        self._clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker."""
        batches = [with_micro_batches(batch, number) for number in (1, 2)] if self._varies else [batch]
        with self._all_kept():
            for one in batches:
                self.train_step(self._wrap(one), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(self._wrap(eval_batch))
        self.enter_world()

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local."""
        with self._gathering.alone(), without_loss(self.model):
            return export_model(self.model, self._objective, format_name, path, batches, self._serve)

    def load_weights_file(self, path: Path, choice: Choice) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local."""
        with without_loss(self.model):
            held = load_weights_file(self.model, path, choice, self._state.model.fields)
        self._ema.restart()
        return held

    def predict(self, batch: TensorFlowBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        with self._gathering.alone():
            outputs, _ = self._predict_function(batch, batch.arrays)
        return {name: to_numpy(tensor) for name, tensor in outputs.items()}

    def plain_model(self) -> keras.Model:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        return plain_model(self.model)

    def _load(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer, and what compression keeps. Local."""
        self._state.load(state)
        self._reducer.load(state)
        self._load_layers(state)

    def _load_weights(self, weights: PortableState, is_part: bool) -> None:
        """Load the model's part of a portable state. Local."""
        self._state.load_weights(weights, is_part)
        self._load_layers(weights)

    def _load_layers(self, state: PortableState) -> None:
        """Let layers load themselves what was assigned; steps that were traced with tensors of theirs go."""
        if self._layer_state.load(state):
            self._compile(self._config)

    def _all_kept(self) -> AbstractContextManager[None]:
        """Return a context after which everything that steps change is as it was."""
        others = [*self._slots, *self._ema.to_broadcast(), *self._scale_variables()]
        return state_kept(self.model, others)

    def _scale_variables(self) -> list[Any]:
        scale = None if self._own_step is not None else self._update.loss_scale
        return [] if scale is None else scale.variables

    def _make_moving_state(self) -> MovingState | None:
        """Return what undoes a step that failed; None in a job that ends with such a step."""
        if not self.workers.is_elastic:
            return None
        changed_early = [*self.model.variables, *self._slots, *self._ema.to_broadcast()]
        return MovingState(self.model, changed_early if self._own_step is not None else ())

    def _make_batches(self, config: Config) -> None:
        """Make what wraps batches, by the workers among whom a step sums its gradients."""
        is_local = config.sync_every is not None
        self._traced_workers = TracedWorkers(self.workers)
        self._near: Sized = LoneWorker(self.workers.host) if is_local else self._traced_workers
        self._wrap = BatchMaker(self.workers.is_elastic, is_local)
        # with a constant global batch, fewer workers have more micro-batches
        self._varies = self.workers.is_elastic and config.global_batch_size is not None

    def _make_reducer(
        self, trainable: Iterable[Field], config: Config
    ) -> tuple[GradientReducer, LossScale | None]:
        """Make what sums gradients over workers, and the scale of the loss if there is one."""
        loss_scale = new_loss_scale(config, self._precision, self.optimizers[0], self._near)
        reducer = choose_reducer(config, self._near, trainable, loss_scale)
        self._reducer = reducer
        return reducer, loss_scale

    def _make_update(
        self, trainable: list[Field], reducer: GradientReducer, loss_scale: LossScale | None, config: Config
    ) -> None:
        """Make the update of a step that is not the task's own."""
        reducer.clock = self._clock
        self._update = update_kind(config, self._shards)(
            trainable,
            self._optimizers[MAIN],
            reducer,
            self._ema,
            self._clock,
            workers=self._near,
            clip_norm=config.clip_norm,
            loss_scale=loss_scale,
        )

    def _make_objectives(self, task: Any, config: Config) -> None:
        """Make what a step differentiates, and what an evaluation and a prediction compute."""
        self._objective: Objective = make_objective(task, "tf", NAMED)
        self._serve, self._is_one_call = getattr(task, "tf_serve", None), not hasattr(task, "tf_loss")
        mixing = partial(mixed, cast=tf.cast) if config.mixup or config.cutmix else None
        self._train_objective = make_objective(task, "tf", NAMED, config.label_smoothing, mixed=mixing)
        self._evaluation = EvaluationMetrics.of(task, FUNCTIONS)

        def seen(outputs: Any, batch: Mapping[str, Any]) -> None:
            self._evaluation.watch(outputs, masks_beside(outputs, batch))

        watch = seen if self._evaluation else None
        self._eval_objective = make_objective(task, "tf", NAMED, watch=watch)
        self._task = task
        self._is_own_loss = own = has_own_values(task, "tf")
        # in training or not: whether padding is left out, as for losses that calls of the model add
        self._leaves_out: dict[bool, bool] = {True: True, False: True} if own else {}
        self._gathering = Gathering(self.workers.most, config.compile)

    def _make_model(self, task: Any, config: Config, batch: HostBatch | None) -> ModelState:
        """Make the task's model, changed as the config asks; return this worker's variables."""
        self._batch_norm = BatchNormSync(self._traced_workers)
        self.model = make_model(task, config, self._batch_norm)
        self._precision = precision_of(self.model, config.precision)
        self._called = cast_outputs_to_fp32(self.model, self._precision)
        self._seed_states = [v for v in self.model.variables if v.name == "seed_generator_state"]
        self._seed_states.append(global_seed_generator().state)  # of keras.random without a seed
        tf.random.set_seed(mix(self._seed, 0, self.workers.rank) >> 33)  # of operations, when they are traced
        self._layer_state = LayerState(self.model)
        tensors = ModelState(self.model, Renaming(task, "tf"))
        self._shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        return tensors

    def _make_state(self, tensors: ModelState) -> TrainingState:
        """Make the state of this worker."""
        return make_state(tensors, self._optimizers, self._ema, self._local, self._shards)

    def _make_optimizers(
        self, task: Any, config: Config, tensors: ModelState, groups: ParameterGroups, method: str
    ) -> tuple[NamedOptimizers, OwnRates | None, dict[str, float]]:
        """Make the optimizers and their slots; return also the rates of the task's own, and their factors."""
        if method == "tf_optimizers":
            chosen = make_optimizers(task, self.model, tensors)
        else:
            optimizer = choose_optimizer(task, config, tensors, groups.options)
            chosen = {MAIN: (optimizer, list(tensors.trainable_fields()))}
        self._optimizers = {name: optimizer for name, (optimizer, _) in chosen.items()}
        own_rates, factors = take_rates(self._optimizers, method) if method else (None, {})
        self._slots = [
            v for one, fields in chosen.values() for v in shard_optimizer(one, fields, self._shards)
        ]
        return chosen, own_rates, factors

    def _compile(self, config: Config) -> None:
        """Make the functions that steps call; they are traced when they first are."""
        gradients: GradientsOf = self._gradients_of
        evaluate = self._eval_sums
        if config.compile:  # the parts without a collective
            check_compiler(self.workers.host)
            gradients, evaluate = compiled(gradients), compiled(evaluate)

        def learnt() -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
            return self._names, self._weighted, self._unused

        # batches without their padding have a function for each number of samples that count, which the
        # task's functions see as the shape; there are few
        self._eval_function = cache(lambda counts: Compiled(of_counted(counts, evaluate), learnt))
        if (step := self._own_step) is not None:
            changing = [*self.model.variables, *self._slots, *self._ema.to_broadcast(), *self._seed_states]
            others = (learnt, changing, step.error_of)
            self._train_function: Any = cache(
                lambda counts: CompiledByStep(partial(self._train_own_step, counts, step), *others)
            )
        else:
            self._train_function = cache(
                lambda counts: Compiled(partial(self._train_step, gradients, True, counts), learnt)
            )
            # a worker without samples, as there may be in the last local step, has no gradient
            self._train_function_of_none = Compiled(partial(self._train_step, gradients, False, ()), learnt)
        self._predict_function = Compiled(self._predicted, lambda: None)

    def _predicted(self, arrays: Any) -> dict[str, Tensor]:
        return predicted(self._called, self._objective, arrays, self._serve, self._is_one_call)

    def _seeds(self, step: int) -> Tensor:
        """Return the states of the model's seed generators for one step, (generators, 2)."""
        keys = [mix(self._seed, step, self.workers.rank, i) for i in range(len(self._seed_states))]
        return tf.convert_to_tensor(np.asarray([[key >> 32, 0] for key in keys], np.int64))

    def _set_seeds(self, seeds: Tensor) -> None:
        """Set the seed generators for a step; when it is traced, also what is drawn for its trace."""
        seed_host_step(mix(self._seed, self.workers.rank) >> 1)
        for i, state in enumerate(self._seed_states):
            state.assign(seeds[i])

    def _train_step(  # noqa: PLR0917 - tensors, by position as a compiled step is called
        self,
        gradients_of: GradientsOf,
        updates: bool,
        counts: tuple[int, ...],
        arrays: Any,
        weights: Tensor,
        gradient_weights: Tensor,
        total_weight: Tensor,
        learning_rate: Tensor,
        share: Tensor,
        seeds: Tensor,
        signals: Tensor,
    ) -> Tensor:
        self._set_seeds(seeds)
        update = self._update
        gradient_weights = update.scale(gradient_weights)
        if len(weights.shape) == 1:
            gradients, sums = of_counted(counts, gradients_of)(arrays, weights, gradient_weights)
        else:
            gradients, sums = accumulated_gradients(gradients_of, arrays, weights, gradient_weights, counts)
        unused = float(len(self._unused))
        vector = joined(sums, *self._clock.numbers(), [unused, 0.0], signals)
        gradients, vector = update.reduce(gradients, vector)
        gradients, vector = update.unscale_or_skip(gradients, vector)
        counted = vector[len(self._names)] if "loss" in self._weighted else None
        gradients = update.normalize(gradients, counted, total_weight)
        gradients = update.clip(gradients)
        if updates:
            update.update(gradients, learning_rate)
        if self._local is None:
            update.ema(share)
        return vector

    def _train_own_step(
        self, counts: tuple[int, ...], step: OwnStep, number: StepNumber, *tensors: Any
    ) -> Tensor:
        """Collective. Do the task's own step; the tensors are those of ``_train_step``."""
        arrays, weights, gradient_weights, total_weight, learning_rate, share, seeds, signals = tensors
        self._set_seeds(seeds)

        def sums_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, total_weight, learning_rate)
            return tf.linalg.matvec(self._own_rows(step, micro_batch, number, part), weights)

        sums = of_counted(counts, sums_of)(arrays, weights, gradient_weights)
        sums = joined(sums, [float(len(self._unused)), 0.0], signals)
        vector = step.reduce(sums, self._names, self._weighted)
        self._ema.update(share)
        return vector

    def _own_rows(self, step: OwnStep, micro_batch: Any, number: StepNumber, part: StepPart) -> Tensor:
        """Collective. Do the task's own step, or a dry run of it, and return the rows of its values."""
        run = partial(step.run, number=number, samples=part)
        rows = self._per_sample(micro_batch, part.weights, True, run).rows
        self._unused = step.unused()
        return rows

    def _dry_run(
        self, batch: TensorFlowBatch, training: bool, meter: ActivationMeter, draws: list[str]
    ) -> dict[str, NDArray[Any]]:
        """Return the loss and the metrics of a batch's first micro-batch, by name.

        It is computed eagerly: that takes no trace, and errors name the user's own lines. What works in
        a graph alone is traced.
        """
        arrays, weights, gradient_weights = self._first_counted(batch, training)

        seed_operations(batch.step)
        self._set_seeds(self._seeds(batch.step))

        def compute() -> tuple[Tensor, Seen]:
            if training and self._own_step is not None:
                part = StepPart(weights, gradient_weights, batch.total, None)
                rows = self._own_rows(self._own_step, arrays, StepNumber(batch.step), part)
                return rows, self._evaluation.take()
            with tf.GradientTape() as tape, tf.GradientTape() as other:
                losses, own, rows = self._per_sample(arrays, weights, training)
            if training:
                self._check_variables(losses, other)
                own_weights = gradient_weights if own is None else gradient_weights * own
                meter.take_gradients(self._update.backward(losses, own_weights, tape))
            return rows, self._evaluation.take()

        # with collectives, the other workers are not going to compute it again
        self._gathering.is_used = False
        with draws_noted(draws):
            rows, seen = run_eagerly(
                compute, can_repeat=lambda: not (self._has_collectives or self._gathering.is_used)
            )
        if not training:
            self._evaluation.try_out(
                masks_within(*seen) if seen else seen, batch.samples.rows(0, len(weights))
            )
        return sample_values(self._names, self._weighted, rows.numpy(), weights.numpy())

    def _check_variables(self, losses: Tensor, tape: tf.GradientTape) -> None:
        """Refuse trainable variables outside of the model for which losses have a gradient."""
        own = {id(native(variable)) for variable in self.model.variables}
        foreign = [v for v in tape.watched_variables() if v.trainable and id(v) not in own]
        gradients = tape.gradient(losses, foreign) if foreign else []
        for variable, gradient in zip(foreign, gradients, strict=True):
            if gradient is not None:
                check_foreign(self._task, "tf", variable, is_parameter=True)

    def _first_counted(
        self, batch: TensorFlowBatch, training: bool
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the first micro-batch with weights and gradient weights, without padding as in a step."""
        parts = (batch.arrays, batch.weights, batch.gradient_weights)
        if len(batch.weights.shape) > 1:  # several micro-batches
            parts = tf.nest.map_structure(lambda a: a[0], parts)
        counts = batch.counts[:1] if self._leaves_out.get(training) else ()
        first: tuple[dict[str, Tensor], Tensor, Tensor] = of_counted(counts, lambda *counted: counted)(*parts)
        return first

    def _numbers(self, signals: Sequence[float]) -> Tensor:
        """Return what workers tell one another, as a tensor."""
        return self._no_signals if signals is NO_SIGNALS else tf.constant(signals, tf.float32)

    def _gradients_of(
        self, micro_batch: Any, weights: Tensor, gradient_weights: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return one micro-batch's part of the gradient and the weighted sums of its values."""
        with tf.GradientTape() as tape:
            losses, own, rows = self._per_sample(micro_batch, weights, training=True)
        own_weights = gradient_weights if own is None else gradient_weights * own
        gradients = self._update.backward(losses, own_weights, tape)
        # traced once: which variables the graph reaches does not change from step to step
        gradients, self._unused = self._update.fill_in_unused(gradients)
        return gradients, tf.linalg.matvec(rows, weights)

    def _eval_sums(self, arrays: Any, weights: Tensor) -> tuple[Tensor, Seen]:
        rows = self._per_sample(arrays, weights, training=False).rows
        return tf.linalg.matvec(rows, weights), self._evaluation.take()

    def _learn_form(self, batch: TensorFlowBatch, training: bool) -> None:
        """Find out whether calls of the model add losses, which must be known of a batch with padding.

        They are traced and not run, which changes nothing.
        """
        if training in self._leaves_out or not batch.is_padded or (training and self._own_step is not None):
            return

        def traced(arrays: Any, weights: Tensor) -> Tensor:
            if len(weights.shape) > 1:  # several micro-batches
                arrays, weights = tf.nest.map_structure(lambda a: a[0], (arrays, weights))
            return self._per_sample(arrays, weights, training).rows

        tf.function(traced, autograph=False).get_concrete_function(batch.arrays, batch.weights)

    def _per_sample(
        self,
        micro_batch: Mapping[str, Tensor],
        weights: Tensor,
        training: bool,
        own_step: Objective | None = None,
    ) -> Values:
        """Collective if the objective gathers. Return losses and all values of a micro-batch's samples."""
        given = self._given(micro_batch, weights, training, own_step)
        check_values(given, weights.shape[0])
        self._names = tuple(given)
        self._weighted = tuple(name for name, value in given.items() if isinstance(value, Weighted))
        return weigh(given, tf.shape(weights)[0], weights.dtype)

    def _given(
        self,
        micro_batch: Mapping[str, Tensor],
        weights: Tensor,
        training: bool,
        own_step: Objective | None = None,
    ) -> dict[str, Any]:
        """Collective if the objective gathers. Return what it gives: the loss, the first, and the metrics."""
        self._batch_norm.weights = weights
        objective = own_step or (self._train_objective if training else self._eval_objective)
        phase = Phase(self._called, training)
        among = self._gathering.among(self._near if training else self._traced_workers, weights)
        with phase_of_layers(training), among:
            losses, metrics = objective(phase, micro_batch)
        if (added := phase.added_loss()) is not None:
            check_free(REGULARIZATION_LOSS, (*metrics, *self._evaluation.order))
            losses = add_to_loss(losses, added)
            metrics = {**metrics, REGULARIZATION_LOSS: tf.fill(tf.shape(weights)[:1], added)}
        if not self._is_own_loss:
            self._leaves_out[training] = phase.has_losses_of_calls
        return {"loss": losses, **metrics}


_backend: type[Backend] = TensorFlowBackend
_files: type[ModelFiles] = TensorFlowBackend
