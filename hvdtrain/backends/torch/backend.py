"""PyTorch behind the Backend protocol, over ``horovod.torch``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.base import Backend, ModelFiles, PendingState
from hvdtrain.backends.choice import Choice
from hvdtrain.backends.common import CommonBackend
from hvdtrain.backends.objective.counting import Weighted, sample_values
from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.objective.gathering import GivenArrays, find_comparing
from hvdtrain.backends.objective.logits import check_foreign
from hvdtrain.backends.objective.objective import Objective, has_own_values, make_objective, mixed
from hvdtrain.backends.optimizers import MAIN, ParameterGroups, own_optimizer_method
from hvdtrain.backends.options import check_precision
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
from hvdtrain.backends.step_metrics import NO_SIGNALS, NUMBERS_AFTER_SUMS, PartialSums, PendingVector
from hvdtrain.backends.torch.activations import ActivationMeter, apply_activation_checkpointing
from hvdtrain.backends.torch.batches import BatchMaker, TorchBatch, TorchPending
from hvdtrain.backends.torch.dry_run import (
    Recorder,
    changed_in_place,
    copied,
    count_frozen,
    describe_undone,
    last_activation,
    parts_in_evaluation,
    state_kept,
)
from hvdtrain.backends.torch.export import export_model, load_weights_file, plain_model
from hvdtrain.backends.torch.objective.evaluation import FUNCTIONS, HorovodCollectives
from hvdtrain.backends.torch.objective.gathering import Gathering
from hvdtrain.backends.torch.objective.losses import NAMED, Values, as_arrays, check_values, weigh
from hvdtrain.backends.torch.precision import LossScale, autocast, cast_outputs_to_fp32, float_bits_of
from hvdtrain.backends.torch.program import predicted, to_numpy
from hvdtrain.backends.torch.reduction.broadcast import broadcast_model, broadcast_tensors
from hvdtrain.backends.torch.reduction.local_steps import LocalSteps
from hvdtrain.backends.torch.reduction.reducer import check_kinds
from hvdtrain.backends.torch.reduction.sharded_parameters import make_shards
from hvdtrain.backends.torch.replica_state import StateTensors, TrainedSet
from hvdtrain.backends.torch.state.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.state.moving_state import MovingState
from hvdtrain.backends.torch.state.slots import fill_slots, make_slots
from hvdtrain.backends.torch.step_clock import ProfilerRecorder, StepClock
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState, optimizers_kept
from hvdtrain.backends.torch.steps.optimizers import choose_optimizer
from hvdtrain.backends.torch.steps.own_step import OwnStep, make_optimizers, take_rates
from hvdtrain.backends.torch.steps.sharded_optimizer import make_ema, shard_optimizer
from hvdtrain.backends.torch.steps.sharded_state import make_state
from hvdtrain.backends.torch.steps.sharded_update import update_kind
from hvdtrain.backends.torch.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.torch.task_model import (
    check_compiler,
    check_parts,
    choose_device,
    compiled,
    device_memory,
    foreign_leaf,
    make_model,
    unused_methods,
)
from hvdtrain.backends.trained_set import frozen_by_config, not_in_own_step
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import PeerLostError, TaskError
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_host_step

# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6


def start(
    config: Config,
    membership: Membership | None = None,
    ranks: Sequence[int] = (),
    kind: "type[TorchBackend] | None" = None,
) -> "TorchBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Args:
        config: its ``device``, ``threads``, ``precision`` and ``stages`` are used.
        membership: this worker's part in an elastic job; None in other jobs.
        ranks: the ranks of MPI that make up the job, if others run something else; empty for all.
        kind: the class of the backend, if it is another one.

    Raises:
        EnvironmentFault: If the device is missing or the launcher does not fit.
    """
    workers = start_horovod(hvd, HorovodCollectives(), membership, ranks, has_groups=config.stages > 1)
    device = choose_device(config.device, workers)
    check_precision(config.precision, device.type == "cuda", workers.host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or threads_per_worker(workers.local_size))
    # as TensorFlow does: subnormal numbers, which moments decay to, are a hundred times slower
    torch.set_flush_denormal(True)
    return (kind or TorchBackend)(workers, device)


class TorchBackend(CommonBackend):
    """The PyTorch backend of one worker.

    Args:
        workers: the job's workers.
        device: where this worker computes.

    Attributes:
        model: the task's model after ``build``.
        optimizers: its optimizers after ``build``.
    """

    collectives, state_tensors, local_steps = HorovodCollectives, StateTensors, LocalSteps
    model: torch.nn.Module
    _state: TrainingState
    _trained_set: TrainedSet
    _ema: ExponentialMovingAverage
    _own_step: OwnStep | None
    _shapes: dict[str, tuple[int, ...]]  # of the trainable parameters, by portable name

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers: Workers = workers
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        self.info = BackendInfo(f"PyTorch {torch.__version__} on {on}", {"torch": torch.__version__})
        self._device = device
        self._no_findings = torch.zeros(NUMBERS_AFTER_SUMS, device=device)
        # which of train() and eval() was called last, and what the model's flag was then; None before both
        self._is_training, self._flag = False, cast(bool | None, None)

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and steps, with their initial values. Collective if the model is split."""
        torch.manual_seed(mix(config.seed, 0) >> 1)
        self._seed = config.seed
        # of the sums, and of those with weights of their own; shapes are checked when they change
        self._names: tuple[str, ...] = ()
        self._weighted: tuple[str, ...] = ()
        self._make_batches(config)
        self._make_objectives(task, config)
        step = own_step_of(task, config)
        tensors = self._make_model(task, config, batch)
        self._wrap.float_bits = float_bits_of(self.model)
        on_parts = check_parts(self.model) if self.workers.size > 1 or self.workers.is_elastic else ()
        own_optimizer = own_optimizer_method(task, config)
        shapes = self._shapes
        groups = ParameterGroups(config, shapes, own_optimizer)
        tensors.freeze(groups.frozen)
        trainable = [entry for entry in tensors.entries if entry.trainable]
        if not groups.options:
            raise TaskError("the model has no parameter that requires a gradient")
        check_kinds(trainable, config)
        self._shards = shards = make_shards(config, trainable, self.workers)
        own_rates = self._make_optimizers(task, config, tensors, groups, own_optimizer)
        self.optimizers = list(self._optimizers.values())
        self._ema = make_ema(tensors, config.ema_decay, shards)
        self._local: LocalSteps | None = None
        reducer, loss_scale = self._make_reducer(tensors.trainable_fields(), config)
        measured = (
            step is None
            and not (config.sync_batch_norm or config.sync_every or config.stages > 1)
            and self._device.type == "cpu"
        )
        self._clock = StepClock(self.workers, measured)
        self._own_step = None
        if step is None:
            self._make_update(trainable, reducer, loss_scale, config, bool(own_optimizer))
            self._local = self._make_local_steps(tensors, own_optimizer, config)
        else:
            self._own_step = OwnStep(
                step, self._optimizers, trainable, config, self._ema, workers=self.workers
            )
        self._state = self._make_state(tensors)
        self.weight_shapes = self._state.weight_shapes()
        self._make_replica_state(task)
        self._task, self._config = task, config
        self._trained_set = TrainedSet(self.model, tensors)
        changed_early = self._optimizers.values() if self._own_step is not None else ()
        self._moving = MovingState(self.model, trainable, tuple(changed_early))
        if config.initial_parameters == "portable":
            self._state.load_initial(config.seed)
        return ModelInfo(
            {name: shapes[name] for name in groups.options},
            len(find_batch_norms(self.model)),
            describe_local_steps(config) if config.sync_every else reducer.describe(),
            own_rates,
            notes=(*unused_methods(self.model), *on_parts, *notes_on_copies(step, self.workers.is_elastic)),
            groups=tuple(groups.lines),
            frozen_parameters=count_frozen(self.model),
            float_bits=self._wrap.float_bits,
            leaves_out_padding=self._leaves_out or step is not None,
        )

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TorchBatch]:
        """Yield the device batches that the steps take, one ahead of the host's."""
        if self._device.type == "cpu":
            yield from map(self._wrap, batches)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ahead: TorchBatch | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = self._wrap(batch)
            if ahead is not None:
                yield ahead
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            for tensor in copied.tensors():
                tensor.record_stream(current)
            ahead = copied
        if ahead is not None:
            yield ahead

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state."""
        recorder, values, error, changes = Recorder(self.model), {}, None, Changes()
        in_evaluation, undone = parts_in_evaluation(self.model), ""
        meter: ActivationMeter | None = None
        memory: StepMemory | None = None
        changed: tuple[str, ...] = ()
        try:
            with peer_errors(), state_kept(self.model, self._device):
                wrapped = self._wrap(copied(batch))
                with (
                    recorder,
                    self._state_tensors.watched() as changes,
                    (meter := ActivationMeter(self.model, wrapped.tensors())),
                ):
                    values = self._dry_run(wrapped, training)
                undone = describe_undone(in_evaluation) if training else ""
                changed = changed_in_place(batch, wrapped.micro_batches[0])
            memory = meter.found() if training and self._own_step is None else None
        except PeerLostError:
            raise
        except Exception as raised:
            error = raised
            if meter is not None:
                memory = StepMemory(0, largest=meter.largest())
        self._flag = None  # the modes are as before, so that training begins with a call of train()
        if self._own_step is not None:
            self._trained_set.look()
        skipped = self._own_step.not_applied() if training and self._own_step and not error else []
        note = "; ".join(filter(None, (describe_not_applied(skipped), undone)))
        last = last_activation(self.model)
        found = changes.crcs, changes.refusal, changed
        return DryRun(recorder.outputs, values, last, error, note, memory, *found, self._weighted)

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or "".

        It follows a dry run. The model is in evaluation, so that neither dropout nor batch norm is taken for
        the loss. Of a loss that gathers, and of a step of the task's own, nothing is said.
        """
        is_own_step = training and self._own_step is not None
        if self._gathering.is_used or is_own_step or self._has_unusual_batch_norm():
            return ""
        with peer_errors(), state_kept(self.model, self._device):
            self._enter_mode(training)
            micro_batch, weights, _ = next(self._micro_batches(self._wrap(batch)))
            for module in list(self.model.modules())[1:]:
                module.training = False

            def values_of(rows: NDArray[np.int64], seed: int) -> GivenArrays:
                chosen = torch.from_numpy(rows).to(self._device)
                parts = {name: tensor[chosen] for name, tensor in micro_batch.items()}
                with state_kept(self.model, self._device), torch.set_grad_enabled(training):
                    self._seed_step(seed)
                    given = self._given(parts, weights[chosen])
                return {name: as_arrays(value) for name, value in given.items()}

            tolerance = 1e-4 if self._precision == "fp32" else 3e-2
            found = find_comparing(values_of, len(weights), tolerance)
        self._flag = None
        return found

    def train_step(
        self, batch: TorchBatch, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingVector:
        """Collective. Do one optimizer update with the mean gradient over the global batch."""
        self._seed_step(batch.step)
        self._enter_mode(training=True)
        if self.workers.is_elastic:
            self._moving.keep()
        try:
            with peer_errors():
                if self._own_step is not None:
                    return self._train_own_step(self._own_step, batch, learning_rate, signals)
                self._update.zero_grad()
                self._update.expect(len(batch.weights), batch.in_warmup)
                return self._train_step(batch, learning_rate, signals)
        except BaseException:
            self._forget_step()
            if self.workers.is_elastic:
                self._moving.restore()
            raise

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        return device_memory(self._device)

    def recorder(self) -> ProfilerRecorder:
        """Return what records this worker's steps. Local: no collective."""
        return ProfilerRecorder(self._clock)

    def eval_step(self, batch: TorchBatch, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        self._enter_mode(training=False)
        if partial is None:
            self._evaluation.begin()
        # and no inference mode, whose tensors neither a step nor Horovod can use later
        with torch.no_grad(), peer_errors():
            for place, (micro_batch, weights, _) in enumerate(self._micro_batches(batch)):
                sums = torch.mv(self._per_sample(micro_batch, weights).rows, weights)
                before = 0.0 if partial is None else partial.weight
                sums = sums if partial is None else partial.values + sums
                partial = PartialSums(self._names, self._weighted, sums, before + batch.total_weight)
                if self._evaluation:
                    self._evaluation.add(self._evaluation.take(), batch.samples.rows(place, len(weights)))
        assert partial is not None  # a batch has at least one micro-batch
        return partial

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        vector = torch.cat((partial.values, self._numbers([], signals)))
        if self.workers.size > 1:
            with peer_errors():
                hvd.allreduce_(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return self._evaluated(partial.names, vector, partial.weight, partial.weighted)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has the moving average of its weights, if any."""
        return self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Return a context as ``ema_weights``, after which the model is in training, as each trainer has it.

        So ``train()`` undoes with the averages what ``eval()`` did with them, such as merging them.
        """
        with self._ema.in_model():
            try:
                yield
            finally:
                if not self._is_training:
                    self._enter_mode(training=True)

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved."""
        error = self._state_tensors.take_back()
        with peer_errors():
            return self.replica_state.combine(error)

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what requires a gradient now, or what a checkpoint keeps; return how many numbers. Local."""
        if self._own_step is not None:
            raise not_in_own_step()
        tensors, before = self._state.model, self._optimizer
        if kept is None:
            self._trained_set.optimize({id(p) for group in before.param_groups for p in group["params"]})
        else:
            self._trained_set.follow(kept)
        shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        own_optimizer = own_optimizer_method(self._task, self._config)
        groups = ParameterGroups(self._config, shapes, own_optimizer)
        if groups.frozen:
            raise frozen_by_config(sorted(groups.frozen))
        self._make_optimizers(self._task, self._config, tensors, groups, own_optimizer)
        self.optimizers = list(self._optimizers.values())
        optimizer = self._optimizers[MAIN]
        if kept is None:
            optimizer.state.update({parameter: slots for parameter, slots in before.state.items() if slots})
        elif own_optimizer:
            make_slots(optimizer, self._trained_set.ids_of(kept["slots"]))
        if own_optimizer and len(optimizer.param_groups) == len(before.param_groups):
            for group, old in zip(optimizer.param_groups, before.param_groups, strict=True):
                group.update({key: value for key, value in old.items() if key != "params"})
        self._ema = self._ema.renewed(tensors)
        self._trained_set.accept()
        trainable = [entry for entry in tensors.entries if entry.trainable]
        self._make_update(trainable, self._reducer, self._loss_scale, self._config, bool(own_optimizer))
        self._state = self._make_state(tensors)
        self._moving = MovingState(self.model, trainable)
        return sum(entry.tensor.numel() for entry in trainable)

    def undone_step(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it."""
        with self._trained_set.as_before(), self._all_kept():
            self.train_step(batch.copied(), learning_rate, signals)

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        if self._own_step is not None:
            return None
        return self._trained_set.state(
            optimized={id(p) for group in self._optimizer.param_groups for p in group["params"]},
            slots={id(p) for p, slots in self._optimizer.state.items() if slots},
        )

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread."""
        self._state.check()
        kept = self._kept_by_compression() | self._state.model.extra_states()
        return self._state.gather(kept, spool, is_root=self.workers.rank == 0)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        self.replica_state.restart()
        if self.workers.size == 1:
            return
        self._moving.forget()
        self._state_tensors.take_back()
        with peer_errors():
            if self.workers.is_elastic:
                self.replica_state.follow(self.workers, root)
            self._state.broadcast_optimizers(self.workers, root)
            broadcast_model(self.model, self._state.model, self.workers, root)
            self._state.broadcast_ema(root)
            if self._local is not None:
                broadcast_tensors(self._local.to_broadcast(), root, label="local")
            self._reducer.broadcast(root)
            if self._loss_scale is not None:
                found = hvd.broadcast_(self._loss_scale.to_broadcast(), root, "hvdtrain.loss_scale")
                self._loss_scale.follow(found)

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local."""
        self._forget_step()
        self._evaluation.begin()
        self._clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker."""
        with self._all_kept():
            self.train_step(self._wrap(batch), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(self._wrap(eval_batch))
            self._moving.keep()  # for what it has found to move
        self._moving.forget()
        self.enter_world()

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local."""
        with self._gathering.alone():
            return export_model(
                self.model, self._new_model, self._objective, format_name, path, batches, self._serve
            )

    def load_weights_file(self, path: Path, choice: Choice) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local."""
        held = load_weights_file(self.model, path, choice, self._state.model.fields)
        self._ema.restart()
        return held

    def predict(self, batch: TorchBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        self._enter_mode(training=False)
        found: dict[str, list[NDArray[Any]]] = {}
        with torch.no_grad(), autocast(self._precision, self._device), self._gathering.alone():
            for micro_batch in batch.micro_batches:
                outputs = predicted(self.model, self._objective, micro_batch, self._serve, self._is_one_call)
                for name, tensor in outputs.items():
                    found.setdefault(name, []).append(to_numpy(tensor.cpu()))
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def plain_model(self) -> torch.nn.Module:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        return plain_model(self.model, self._new_model)

    def _load(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer, and what compression keeps. Local."""
        self._state.load(state)
        self._state.model.load_extra_states(state)
        self._reducer.load(state)

    def _load_weights(self, weights: PortableState, is_part: bool) -> None:
        """Load the model's part of a portable state. Local."""
        self._state.load_weights(weights, is_part)
        self._state.model.load_extra_states(weights)

    @contextmanager
    def _all_kept(self) -> Iterator[None]:
        """Return a context after which everything that steps change is as it was."""
        scale = None if self._loss_scale is None else self._loss_scale.to_broadcast()
        averages = [average for _, average in self._ema.to_broadcast()]
        with state_kept(self.model, self._device, averages), optimizers_kept(self._optimizers.values()):
            yield
        if self._loss_scale is not None and scale is not None:
            self._loss_scale.follow(scale)

    def _make_objectives(self, task: Any, config: Config) -> None:
        """Make what a step differentiates, and what an evaluation and a prediction compute."""
        self._objective: Objective = make_objective(task, "torch", NAMED)
        self._serve, self._is_one_call = getattr(task, "torch_serve", None), not hasattr(task, "torch_loss")
        mixing = partial(mixed, cast=torch.Tensor.to) if config.mixup or config.cutmix else None
        self._train_objective = make_objective(task, "torch", NAMED, config.label_smoothing, mixed=mixing)
        self._evaluation = EvaluationMetrics.of(task, FUNCTIONS)
        watch = self._watch if self._evaluation else None
        self._eval_objective = make_objective(task, "torch", NAMED, watch=watch)
        self._task, self._leaves_out = task, has_own_values(task, "torch")
        self._gathering = Gathering(self.workers.most)

    def _watch(self, outputs: Any, batch: Any) -> None:
        """Keep outputs for the metrics, without the gradient that a model may compute in evaluation, too."""
        self._evaluation.watch(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), batch)

    def _make_model(self, task: Any, config: Config, batch: HostBatch | None) -> ModelState:
        """Make the task's model on its device, changed as the config asks; return this worker's tensors."""
        model = make_model(task).to(self._device)
        self._batch_norm, self._has_batch_norm = BatchNormSync(self.workers), bool(find_batch_norms(model))
        if config.sync_batch_norm:
            self._batch_norm.take_over(model)
        self._precision = config.precision
        cast_outputs_to_fp32(model, config.precision)
        if config.checkpoint_activations:
            apply_activation_checkpointing(model)
        if config.compile:
            check_compiler(self._device, self.workers.host)
            model = compiled(model)
        self.model, self._new_model = model, task.torch_model
        tensors = ModelState(model, Renaming(task, "torch"))
        self._shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        return tensors

    def _make_state(self, tensors: ModelState) -> TrainingState:
        """Make the state of this worker."""
        return make_state(tensors, self._optimizers, self._ema, self._local, self._shards)

    def _make_optimizers(
        self, task: Any, config: Config, tensors: ModelState, groups: ParameterGroups, own_optimizer: str
    ) -> OwnRates | None:
        """Make the optimizers; return the rates of the task's own."""
        if own_optimizer == "torch_optimizers":
            self._optimizers = make_optimizers(task, self.model, tensors)
        else:
            self._optimizers = {MAIN: choose_optimizer(task, config, tensors, groups.options)}
        if own_optimizer:
            return take_rates(self._optimizers)
        shard_optimizer(self._optimizers[MAIN], self._shards)
        fill_slots(self._optimizers[MAIN])
        return None

    def _seed_step(self, step: int) -> None:
        seed = mix(self._seed, step, self.workers.rank) >> 1
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        seed_host_step(seed)

    def _train_step(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        update, local = self._update, self._local
        if local is not None:
            local.begin()
        sums: torch.Tensor | None = None
        for micro_batch, weights, gradient_weights in self._micro_batches(batch):
            self._batch_norm.weights = weights
            losses, own, rows = self._per_sample(micro_batch, weights)
            scaled = update.scale(gradient_weights)
            update.backward(losses, scaled if own is None else scaled * own)
            sums = torch.mv(rows, weights) if sums is None else sums.addmv_(rows, weights)
        assert sums is not None  # a step has at least one micro-batch
        unused = update.fill_in_unused()
        vector = update.reduce(torch.cat((sums, *self._clock.numbers(), self._numbers(unused, signals))))
        # a worker without samples, as there may be in the last local step, has no gradient
        if update.unscale_or_skip(vector) and batch.reduced_weight:
            counted = vector[len(self._names)] if "loss" in self._weighted else None
            update.normalize(counted, batch.reduced_weight)
            update.clip()
            update.update(learning_rate)
        if local is not None:
            return local.add(batch, self._names, self._weighted, vector, unused)
        update.ema(batch.step + 1)
        return TorchPending(
            self._names,
            vector,
            batch.total_weight,
            unused,
            self._weighted,
            timed=self._clock.timed,
            workers=self.workers.size,
        )

    def _forget_step(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        if self._own_step is not None:
            self._own_step.begin()
        else:
            self._update.begin()
            self._update.zero_grad()

    @property
    def _loss_scale(self) -> LossScale | None:
        return None if self._own_step is not None else self._update.loss_scale

    def _make_batches(self, config: Config) -> None:
        """Make what wraps batches, by the workers among whom a step sums its gradients."""
        is_local = config.sync_every is not None
        self._near: Workers = LoneWorker(self.workers.host) if is_local else self.workers
        self._wrap = BatchMaker(self._device, is_local)

    def _make_reducer(
        self, trainable: Iterable[Field], config: Config
    ) -> tuple[GradientReducer, LossScale | None]:
        """Make what sums gradients over workers, and the scale of the loss if there is one."""
        loss_scale = LossScale(self._near) if config.precision == "fp16" else None
        reducer = choose_reducer(config, self._near, trainable, loss_scale)
        self._reducer = reducer
        return reducer, loss_scale

    def _make_update(
        self,
        trainable: list[Entry],
        reducer: GradientReducer,
        loss_scale: LossScale | None,
        config: Config,
        is_own: bool = False,
    ) -> None:
        """Make the update of a step that is not the task's own."""
        reducer.clock = self._clock
        self._optimizer = self._optimizers[MAIN]
        self._update = update_kind(config, self._shards)(
            trainable,
            self._optimizer,
            reducer,
            self._ema,
            self._clock,
            clip_norm=config.clip_norm,
            loss_scale=loss_scale,
            is_own=is_own,
        )

    def _train_own_step(
        self, step: OwnStep, batch: TorchBatch, learning_rate: float, signals: Sequence[float]
    ) -> PendingVector:
        """Collective. Do the task's own step."""
        micro_batch, weights, gradient_weights = batch.counted(0)
        samples = StepPart(weights, gradient_weights, batch.total_weight, learning_rate)
        rows = self._rows_of_own_step(step, micro_batch, batch.step, samples)
        unused = step.unused()
        numbers = self._numbers(unused, signals)
        sums = torch.cat((torch.mv(rows, weights), numbers))
        vector = step.reduce(sums, self._names, self._weighted)
        step.ema(batch.step + 1)
        self._trained_set.look()
        return TorchPending(self._names, vector, batch.total_weight, unused, self._weighted)

    def _rows_of_own_step(
        self, step: OwnStep, micro_batch: dict[str, torch.Tensor], number: int, samples: StepPart
    ) -> torch.Tensor:
        """Collective. Do the task's own step, or a dry run of it, and return the rows of its values."""
        self._batch_norm.weights = samples.weights
        # a cached cast of a weight would not follow the weight when it is updated within the step
        among = self._gathering.among(self._near, samples.weights)
        with autocast(self._precision, self._device, cache=False), among:
            given = step.run(self.model, micro_batch, number, samples)
        return self._values(given, len(samples.weights)).rows

    def _dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Return the loss and the metrics of a batch's first micro-batch, by name."""
        self._enter_mode(training)
        micro_batch, weights, gradient_weights = next(self._micro_batches(batch))
        self._batch_norm.weights = weights
        self._gathering.is_used = False
        self._names = ()  # so that shapes are checked
        self._seed_step(batch.step)
        if not training:
            with torch.no_grad():
                rows = self._per_sample(micro_batch, weights).rows
                self._evaluation.try_out(self._evaluation.take(), batch.samples.rows(0, len(weights)))
        elif self._own_step is not None:
            samples = StepPart(weights, gradient_weights, batch.total_weight, None)
            rows = self._rows_of_own_step(self._own_step, micro_batch, batch.step, samples)
        else:
            self._update.begin(reduces=False)
            try:
                losses, own, rows = self._per_sample(micro_batch, weights)
                if (leaf := foreign_leaf(losses, self.model)) is not None:
                    check_foreign(self._task, "torch", leaf, isinstance(leaf, torch.nn.Parameter))
                self._update.backward(losses, gradient_weights if own is None else gradient_weights * own)
                self._update.try_out()
            finally:
                self._update.zero_grad()
                self._update.begin()
        return sample_values(self._names, self._weighted, rows.cpu().numpy(), weights.cpu().numpy())

    def _enter_mode(self, training: bool) -> None:
        """Call ``train()`` or ``eval()`` of the model, unless it was the last of both that was called."""
        if self._is_training is not training or self.model.training is not self._flag:
            (self.model.train if training else self.model.eval)()
            self._is_training, self._flag = training, self.model.training

    def _numbers(self, unused: Sequence[str], signals: Sequence[float]) -> torch.Tensor:
        """Return what stands after the sums in a vector that is reduced: findings and signals."""
        if not unused and signals is NO_SIGNALS:
            return self._no_findings
        return self._no_findings.new_tensor((float(len(unused)), 0.0, *signals))

    def _micro_batches(
        self, batch: TorchBatch
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]:
        """Yield micro-batches with weights and gradient weights; functions of the task are given no padding.

        A micro-batch of which no sample counts stays as it is.
        """
        # batch norm trains with no single row, and other workers may have more: such a row is repeated
        least = 2 if self._is_training and self._has_batch_norm else 1
        for place in range(len(batch.weights)):
            if self._leaves_out:
                yield batch.counted(place, least)
            else:
                yield batch.micro_batches[place], batch.weights[place], batch.gradient_weights[place]

    def _per_sample(self, micro_batch: dict[str, torch.Tensor], weights: torch.Tensor) -> Values:
        """Collective if the objective gathers. Return losses and all values of a micro-batch's samples."""
        return self._values(self._given(micro_batch, weights), len(weights))

    def _has_unusual_batch_norm(self) -> bool:
        """Return whether a layer of batch norm has the statistics of the batch in evaluation, too."""
        return any(layer.running_mean is None for layer in find_batch_norms(self.model).values())

    def _given(self, micro_batch: dict[str, torch.Tensor], weights: torch.Tensor) -> dict[str, Any]:
        """Collective if the objective gathers. Return what it gives: the loss, the first, and the metrics."""
        training = self._is_training
        objective = self._train_objective if training else self._eval_objective
        among = self._gathering.among(self._near if training else self.workers, weights)
        with autocast(self._precision, self._device), among:
            losses, metrics = objective(self.model, micro_batch)
        return {"loss": losses, **metrics}

    def _values(self, given: dict[str, Any], samples: int) -> Values:
        """Return the loss, the first, and the metrics of the samples of a micro-batch."""
        weighted = tuple([name for name, value in given.items() if isinstance(value, Weighted)])
        names = tuple(given)
        if names != self._names or weighted != self._weighted:
            check_values(given, samples)
            self._names, self._weighted = names, weighted
        if weighted:
            return weigh(given, samples, self._wrap.float_type)
        kind = self._wrap.float_type
        detached = [value.detach().to(kind) for value in given.values()]
        return Values(given["loss"].to(kind), None, torch.stack(detached))


_backend: type[Backend] = TorchBackend
_files: type[ModelFiles] = TorchBackend
