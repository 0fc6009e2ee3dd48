"""The steps of a job, of which a backend chooses one; each framework has them in its folder ``steps/``."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

from hvdtrain.backends.custom_step import own_step_of
from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.backends.step_metrics import PartialSums, PendingVector
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

# The first whose condition holds is the step of a job. Each framework has it in its folder steps/, in a
# module of this name: "plain_step" is the class PlainStep in plain_step.py.
STEPS: dict[str, Callable[[Any, Config], bool]] = {
    "stage_step": lambda task, config: config.stages > 1,
    "custom_step": lambda task, config: own_step_of(task, config) is not None,
    "local_step": lambda task, config: config.sync_every is not None,
    "plain_step": lambda task, config: True,
}


def choose_step(task: Any, config: Config) -> Callable[..., Any]:
    """Return the class of a job's step: a ``WholeModelStep``, or the step of a stage."""
    name = next(name for name, holds in STEPS.items() if holds(task, config))
    folder = FRAMEWORKS[config.framework].module.removesuffix(".backend")
    module = import_module(f"{folder}.steps.{name}")
    found: Callable[..., Any] = getattr(module, name.title().replace("_", ""))
    return found


class WholeModelStep:
    """What the steps of both frameworks share in which each worker has the whole model.

    ``build`` calls the methods up to ``changed_early``, in their order. A step also has ``broadcast``,
    ``train``, ``forget``, ``dry_run`` and ``find_comparing``; local ones have ``synchronize``.

    Attributes:
        follows_trained: whether callbacks may freeze and thaw parameters.
        near: the workers among whom a step sums gradients.
        is_timed: whether the clock can tell the time of this worker from that of the others.
        computation: what a step computes of a batch.
        shapes: the shapes of the whole model's trainable parameters by portable name, when the model is made.
        collectives: the class of what moves objects through the framework's binding of Horovod.
        parts: what the step is made of, after ``attach``.
        state: model and optimizers as portable state, after ``make_state``.
        local: what averages the workers, where steps are local.
        updates: the classes of an update in which each worker updates every parameter, in which it updates
            its part, and in which it also gets the sum of its part of the gradients alone, if there is one.
        states: the classes of the state: of a worker that keeps all of it, and of one that keeps its part.
    """

    follows_trained = True  # whether callbacks may freeze and thaw parameters
    collectives: Any  # the class of what moves objects through the framework's binding of Horovod
    # the classes of an update of every parameter, of a worker's part, and of that with its gradients alone
    updates: tuple[Any, Any, Any]
    states: tuple[Any, Any]  # the classes of the state: of a worker that keeps all of it, and of its part
    computation: Any  # what a step computes of a batch
    near: Any  # the workers among whom a step sums gradients
    shapes: Shapes  # of the whole model's trainable parameters by portable name
    workers: Workers
    parts: Any  # what the step is made of, after ``attach``
    state: Any  # model and optimizers as portable state, after ``make_state``
    local: Any = None  # what averages the workers, where steps are local

    def make_model(self, batch: HostBatch | None) -> Any:
        """Make the task's model; return this worker's tensors. Collective if it is split."""
        tensors = self.computation.make_model()
        self.shapes = {field.name: field.shape for field in tensors.trainable_fields()}
        return tensors

    def update_kind(self, parts: Any) -> Callable[..., Any]:
        """Return what makes the update that the config requests, from the arguments of ``Update``."""
        whole, of_part, of_gradients = self.updates
        if parts.shards is None:
            return cast(Callable[..., Any], whole)
        if parts.config.shard == "optimizer" or of_gradients is None:
            return partial(of_part, parts.shards)
        return partial(of_gradients, parts.config.compression, parts.shards)

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

    def begin(self, batch: Any) -> None:
        """Seed what a training step draws, and put the model into training. Local: no collective."""
        self.computation.begin_step(batch.step)

    def load_layers(self, state: PortableState) -> None:
        """Let layers load what they save themselves, where the framework has such. Local: no collective."""
        raise NotImplementedError

    def evaluate(self, batch: Any, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        found: PartialSums = self.computation.evaluate(batch, partial)
        return found

    def evaluated(self, partial: PartialSums, signals: Sequence[float]) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        pending: PendingVector = self.computation.evaluated(partial, signals)
        return pending

    def completed(self, found: DryRun, training: bool) -> DryRun:
        """Return what a dry run has found, with what the step knows of it."""
        return found
