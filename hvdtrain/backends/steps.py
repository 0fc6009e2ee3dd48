"""The steps of a job, of which a backend chooses one of its folder ``steps/``, and what they are made of."""

from collections.abc import Callable, Sequence
from copy import copy
from importlib import import_module
from typing import Any, Self

from hvdtrain.backends.custom_step import own_step_of
from hvdtrain.backends.optimizers import MAIN, ParameterGroups, own_optimizer_method
from hvdtrain.backends.records import DryRun, ModelInfo, OwnRates, PortableState, Shapes, StatePart
from hvdtrain.backends.reduction import choose_reducer
from hvdtrain.backends.step_metrics import PartialSums, PendingVector
from hvdtrain.backends.trained_set import refused
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.storage.text import some
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

# The first whose condition holds is the step of a job: its module in a framework's folder steps/, its class.
STEPS: dict[tuple[str, str], Callable[[Any, Config], bool]] = {
    ("stage_step", "StageStep"): lambda task, config: config.stages > 1,
    ("custom_step", "CustomStep"): lambda task, config: own_step_of(task, config) is not None,
    ("plain_step", "LocalStep"): lambda task, config: config.sync_every is not None,
    ("plain_step", "PlainStep"): lambda task, config: True,
}


def choose_step(task: Any, config: Config) -> Callable[..., Any]:
    """Return the class of a job's step: a ``WholeModelStep``, or the step of a stage."""
    module, kind = next(step for step, holds in STEPS.items() if holds(task, config))
    folder = FRAMEWORKS[config.framework].module.removesuffix(".backend")
    return getattr(import_module(f"{folder}.steps.{module}"), kind)


class PartsBase:
    """What a step is made of; collective to make with stages. Each framework makes what only it knows."""

    averages: tuple[Any, Any]  # the classes of the moving average: of all parameters, of a worker's part
    # the class of what is trained, what finds batch norms, and what counts frozen parameters
    kinds: tuple[Any, Any, Any]
    optimizers: dict[str, Any]  # by name
    own_rates: OwnRates | None = None  # their learning rates, if they are the task's own
    slot_bytes = 0  # what the task's own optimizers keep, if that is known
    clock: Any  # measures how long this worker is busy
    loss_scale: Any  # the loss scale of fp16, or None
    notes: Sequence[str]  # what the user should know of the model
    trained: Callable[[], list[Any]]  # returns the tensors that are trained now
    make_shards: Callable[[], Any]  # returns the parameters divided among workers; None if each updates all
    make_optimizers: Callable[[], None]  # with what they keep, and the rates of the task's own
    make_rest: Callable[[bool], None]  # makes loss scale, clock and notes, by whether the step is timed
    optimized: Any  # the identities of the parameters that the only optimizer knows

    def __init__(self, step: Any, task: Any, config: Config, batch: HostBatch | None, is_cpu: bool) -> None:
        self.task, self.config, self.workers = task, config, step.workers
        self.tensors, self.computation = step.make_model(batch), step.computation
        self.near = step.near  # the workers among whom gradients are summed
        self.own_optimizer = own_optimizer_method(task, config)
        self.groups = ParameterGroups(config, step.shapes, self.own_optimizer)
        self.tensors.freeze(self.groups.frozen)
        if not self.groups.options:
            raise TaskError("the model has no parameter that is trained")
        self.trainable = self.trained()
        self.shards = self.make_shards()
        self.make_optimizers()
        whole, of_part = self.averages
        only = () if self.shards is None else (self.shards,)
        self.ema = (of_part if only else whole)(self.tensors, config.ema_decay, *only)
        self.make_rest(step.is_timed and is_cpu)
        fields = list(self.tensors.trainable_fields())
        self.reducer = choose_reducer(config, self.near, fields, self.loss_scale)
        self.trained_set = self.kinds[0](self.computation.model, self.tensors)

    def renewed(self, kept: dict[str, list[str]] | None) -> Self:
        """Return the parts for the parameters that are trainable now; what others keep of them stays."""
        new = copy(self)
        if kept is None:
            self.trained_set.accept(self.optimized)
        else:
            self.trained_set.follow(kept)
        shapes = {field.name: field.shape for field in self.tensors.trainable_fields()}
        new.groups = ParameterGroups(self.config, shapes, self.own_optimizer)
        if new.groups.frozen:
            problem = f"a callback thaws {some(sorted(new.groups.frozen), 4)}, which parameter_groups freezes"
            raise refused(problem, "Freeze it in torch_model() or tf_model() instead.")
        new.make_optimizers()
        new.keep_slots(self, kept)
        new.ema = self.ema.renewed(self.tensors)
        self.trained_set.accept()
        new.trainable = self.trained()
        return new

    def known(self) -> dict[str, set[int]]:
        """Return the identities of the parameters that the only optimizer knows."""
        return {"optimized": self.optimized}

    def keep_slots(self, before: Self, kept: dict[str, list[str]] | None) -> None:
        """Take what the optimizer had before, where it is not loaded again."""

    def describe(self, step: Any) -> ModelInfo:
        """Return what is known of a job when its parts are made."""
        computation, model = self.computation, self.computation.model
        _, find_batch_norms, count_frozen = self.kinds
        return ModelInfo(
            {name: step.shapes[name] for name in self.groups.options},
            len(find_batch_norms(model)),
            self.reducer.describe(),
            self.own_rates,
            notes=tuple(self.notes),
            groups=tuple(self.groups.lines),
            frozen_parameters=count_frozen(model),
            synchronized_layers=computation.batch_norm.layers,
            slot_bytes=self.slot_bytes,
            float_bits=computation.wrap.float_bits,
            leaves_out_padding=step.is_own or computation.is_own_loss,
        )


class WholeModelStep:
    """What the steps of both frameworks share in which each worker has the whole model.

    ``build`` calls the methods from ``make_model`` to ``changed_early`` in order, but ``describe`` last.
    A step also has ``run``, ``broadcast``, ``forget`` and ``dry_run``; local ones have ``synchronize``.
    """

    # whether it is the task's own: given no padding, and no callbacks freeze and thaw parameters
    is_own = False
    # in which phases, training or not, this worker can compute values of some samples of a batch alone
    compared: Sequence[bool] = (True, False)
    run: Any  # collective: does a step; returns its vector, the names of its numbers and unused parameters
    pending: Any  # the class of metrics on their way from the device
    collectives: Any  # the class of what moves objects through the framework's binding of Horovod
    # the classes of an update of every parameter, of a worker's part, and of that with its gradients alone
    updates: tuple[Any, Any, Any]
    load_layers: Callable[[PortableState], None]  # lets layers load what they save themselves. Local
    states: tuple[Any, Any]  # the classes of the state: of a worker that keeps all of it, and of its part
    computes: Any  # the class of what a step computes of a batch
    shapes: Shapes  # of the whole model's trainable parameters by portable name
    parts: Any  # what the step is made of, and its update, after ``attach``
    update: Any
    state: Any  # model and optimizers as portable state, after ``make_state``
    local: Any = None  # what averages the workers, where steps are local
    momenta: Any = ()  # the tensors of its outer optimizer

    def __init__(self, task: Any, config: Config, workers: Workers, *device: Any) -> None:
        self.workers, self.computation = workers, self.computes(task, config, workers, *device)
        self.near = self.computation.near  # the workers among whom a step sums gradients

    @property
    def is_timed(self) -> bool:
        """Whether the clock can distinguish the time of this worker from that of the others."""
        return not self.computation.batch_norm.layers

    def make_model(self, batch: HostBatch | None) -> Any:
        """Make the task's model; return this worker's tensors. Collective if it is split."""
        tensors = self.computation.make_model()
        self.shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        return tensors

    def attach(self, parts: Any) -> None:
        """Take the parts of the step, at first and when callbacks have frozen or thawed. Local."""
        parts.reducer.clock = parts.clock
        self.parts, self.update = parts, self.make_update(parts)
        self.trace()

    def trace(self) -> None:
        """Let what steps call be traced anew, where a framework traces, when the next batch comes."""

    def make_update(self, parts: Any) -> Any:
        """Return the update that the config requests."""
        whole, of_part, of_gradients = self.updates
        if parts.shards is None:
            return whole(parts)
        return (of_part if parts.config.shard == "optimizer" else of_gradients)(parts)

    def make_state(self) -> Any:
        """Make and return the state of this worker."""
        parts, (whole, of_part) = self.parts, self.states
        if parts.shards is None:
            self.state = whole(parts.tensors, parts.optimizers, parts.ema, self.local)
        else:
            self.state = of_part(parts.tensors, parts.optimizers[MAIN], parts.ema, parts.shards)
        return self.state

    def weight_shapes(self, own: Shapes) -> Shapes:
        """Return the shapes of the whole model's arrays."""
        return own

    def replicas(self) -> tuple[Any, Any]:
        """Return those who have copies of this worker's state, and what moves objects between them."""
        return self.workers, self.collectives()

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of the job, with what is known of its step."""
        return info

    def changed_early(self) -> Sequence[Any]:
        """Return what a step changes before its last reduction, but for what a forward pass changes."""
        return ()

    def scatter(self, state: PortableState, part: StatePart) -> None:
        """Collective. Load rank 0's portable state, or a part of it, on rank 0."""

        def load() -> None:
            if part is StatePart.ALL:
                self.state.load(state)
                self.parts.reducer.load(state)
            else:
                self.state.load_weights(state, part is StatePart.SOME_WEIGHTS)
            self.load_layers(state)

        run_on_rank_zero(self.workers, load)

    def train(self, batch: Any, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        vector, (names, weighted, unused) = self.run(batch, learning_rate, signals)
        clock, size = self.parts.clock, self.workers.size
        return self.pending(
            names, vector, batch.total_weight, unused, weighted, timed=clock.timed, workers=size
        )

    def evaluate(self, batch: Any, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        return self.computation.evaluate(batch, partial)

    def evaluated(self, partial: PartialSums, signals: Sequence[float]) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        vector = self.computation.summed(partial.values, signals)
        options = {"computed": self.computed(), "order": self.computation.evaluation.order}
        return self.pending(partial.names, vector, partial.weight, weighted=partial.weighted, **options)

    def computed(self) -> dict[str, float]:
        """Collective. Return the metrics of a whole evaluation that are no sums over its samples."""
        return self.computation.evaluation.computed(self.workers)

    def completed(self, found: DryRun, training: bool) -> DryRun:
        """Return what a dry run has found, with what the step knows of it."""
        return found
