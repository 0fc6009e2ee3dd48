"""What both frameworks share of a worker that has a stage of a split model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.pipeline.groups import Layout, StageGroups, TalkingGroup
from hvdtrain.backends.pipeline.messages import Messenger
from hvdtrain.backends.pipeline.pipeline import Pipeline, check_enough, cut, given_cuts
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.config import Config
from hvdtrain.errors import ExchangeError, HvdtrainError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

Form = tuple[tuple[str, ...], tuple[str, ...]]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and what a framework computes with them to divide them."""

    blocks: Sequence[Any]  # the blocks, in order
    # returns what the model is called with for a micro-batch; None if there is none, or if the parameters
    # have no values
    call: Callable[[], Call | None]
    # checks that the blocks compute what the model does, if that is not known; notes what differs
    check: Callable[[Call], None]
    # returns how long the forward pass of each block takes for a micro-batch, and both passes
    seconds: Callable[[Call], tuple[Sequence[float], Sequence[float]]]
    sizes: Callable[[], Sequence[float]]  # returns the bytes of each block's parameters

    def firsts(self, config: Config, workers: Workers) -> list[int]:
        """Collective. Return the first block of each stage, as rank 0 chooses them.

        Raises:
            ConfigError: If the config's own division does not fit.
            TaskError: If there are too few blocks, or they do not compute what the model does.
        """
        check_enough(len(self.blocks), config.stages)

        def choose() -> list[int]:
            try:
                return cuts()
            except HvdtrainError:
                raise
            except Exception as error:  # of the task's code
                where = where_raised(error, own_only=True)
                problem = f"the first batch of the training data fails in the model's blocks: {where}"
                remedy = "With stages, a block can use what the one before returns, and nothing else of it."
                raise TaskError(problem, remedy) from error

        def cuts() -> list[int]:
            call = self.call()
            if call is not None:
                self.check(call)
            if config.stage_cuts is not None:
                return given_cuts(config.stage_cuts, len(self.blocks), config.stages)
            if config.stage_balance == "memory" or call is None:
                return cut(self.sizes(), config.stages)
            forward, both = self.seconds(call)
            # all stages but the last compute each forward pass twice
            return cut([one + two for one, two in zip(forward, both, strict=True)], config.stages, both)

        return run_on_rank_zero(workers, choose, "measuring the blocks of the model")

    def of_stages(self, firsts: Sequence[int]) -> list[Sequence[Any]]:
        """Return the blocks of each stage.

        Args:
            firsts: the first block of each.
        """
        ends = [*firsts[1:], len(self.blocks)]
        return [self.blocks[first:end] for first, end in zip(firsts, ends, strict=True)]


def several_calls() -> TaskError:
    """Return the error of a loss that calls the model more than once."""
    return TaskError("the task's loss calls the model several times", "With stages, it has to call it once.")


def no_call() -> TaskError:
    """Return the error of a loss that does not call the model."""
    return TaskError("the task's loss does not call the model", "With stages, it has to call it once.")


class FirstCall(BaseException):
    """What a model was called with; no error, and none that a task may catch."""

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.named = named


def raise_call(*arguments: Any, **named: Any) -> NoReturn:
    """Raise what a model is called with: it stands for the model."""
    raise FirstCall(arguments, named)


def has_no_part(name: str, model_has_it: bool) -> Exception:
    """Return the error of a loss that uses something of the model but its call.

    If the model does not have it, the error is that of the model, so that a loss may ask whether it is there.
    """
    problem = f"the loss uses the model's {name}"
    if not model_has_it:
        return AttributeError(f"{problem}, which it does not have")
    return TaskError(
        f"{problem}; with stages, no worker has the whole model, and the loss can only call it once",
        "Let the model return what the loss needs, or train without --stages.",
    )


class SharedUpdate:
    """The update of a step of a split model: this worker updates the parameters of its stage.

    Their gradients are summed over the replicas of the stage. Those of weights that several stages share are
    summed over the workers of all of them, which then update them alike.

    Args:
        layout: the place of this worker.
        shared: by the path of a parameter that several stages have: what sums it, and whether this is the
            first of these stages.
        *arguments: those of the framework's ``Update``; the reducer is that of the other parameters.
        **options: likewise.
    """

    _reducer: GradientReducer

    def __init__(
        self,
        layout: Layout,
        shared: Mapping[str, tuple[GradientReducer, bool]],
        *arguments: Any,
        **options: Any,
    ) -> None:
        self._layout = layout
        self._shared = dict(shared)
        super().__init__(*arguments, **options)

    def _parts_of(self, parameters: Iterable[Any]) -> list[tuple[GradientReducer, list[Any]]]:
        """Return what sums gradients with its parameters: those of this stage alone first."""
        parts: dict[int, tuple[GradientReducer, list[Any]]] = {id(self._reducer): (self._reducer, [])}
        for one in parameters:
            reducer = self._shared.get(one.path, (self._reducer, True))[0]
            parts.setdefault(id(reducer), (reducer, []))[1].append(one)
        return [(reducer, own) for reducer, own in parts.values() if own]


class StageStepBase:
    """The part of a stage's step that is the same in both frameworks.

    What a worker does not have, such as the loss in the first stages, the others send it.

    Args:
        config: the config.
        workers: the job's workers.
        collectives: the class of what moves objects through the framework's binding of Horovod.

    Attributes:
        workers: the job's workers.
        layout: the place of this worker.
        groups: the workers that have what this one has, after the model is made.
        owners: the stages that have a tensor, by its path, likewise.
    """

    is_timed, follows_trained = False, True
    computation: Any
    groups: StageGroups
    owners: dict[str, list[int]]
    update: Any
    state: StateOfStage
    _batch_norms: int
    _stages: list[str]
    _firsts: list[int]
    _stage_shapes: list[dict[str, tuple[int, ...]]]

    def __init__(self, config: Config, workers: Workers, collectives: Any) -> None:
        self.workers = workers
        self.layout = Layout.of(workers, config.stages)
        self.pipeline = Pipeline(self.layout, Messenger())
        self._collectives = collectives
        self._accumulate = config.accumulate
        self.notes: list[str] = []  # on what is not as on one worker
        # in training or not: the names of the sums and of those with weights, which the last stage finds
        self.forms: dict[bool, Form] = {}

    @property
    def near(self) -> Any:
        """The workers among whom a step sums gradients: those of all replicas that have this stage."""
        return self.groups.own

    def replicas(self) -> tuple[Any, Any]:
        """Return those who have copies of this worker's state, and what moves objects between them."""
        collectives = self._collectives(self.groups.own)
        return TalkingGroup(self.groups.own, collectives), collectives

    def weight_shapes(self, own: Shapes) -> Shapes:
        """Collective. Return the shapes of the whole model's arrays, of which this worker has some."""
        of_ranks = self.workers.allgather_object(dict(own))
        return {name: tuple(shape) for shapes in of_ranks for name, shape in shapes.items()}

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of this worker's stage with what is known of the whole model."""
        return replace(
            info,
            batch_norm_layers=self._batch_norms,
            stages=tuple(self._stages),
            stage_shapes=tuple(self._stage_shapes),
            stage_cuts=tuple(self._firsts[1:]),
        )

    def completed(self, found: DryRun, training: bool) -> DryRun:
        """Collective. Return what a dry run has found, with what the first replica's last stage has found.

        The memory is that of the worker's own stage, with what messages take while several micro-batches are
        under way.
        """
        if found.error is not None:
            return found
        if training:
            found = replace(found, note="; ".join(filter(None, [found.note, *self.notes])))
        if (memory := found.memory) is not None:
            kept = self.pipeline.kept_bytes(self._accumulate)
            found = replace(found, memory=replace(memory, activations=memory.activations + kept))
        last = self.layout.stages - 1
        sent = self.workers.broadcast_object(_sent_of(found) if self.layout.rank == last else None, last)
        if self.layout.is_last:
            return found
        # what a stage before the last returns are no outputs of the model
        outputs, values, last_activation = (None, {}, "") if self.layout.replica else sent
        return replace(found, outputs=outputs, values=values, last_activation=last_activation)

    def find_comparing(self, batch: object, training: bool) -> str:
        """Return nothing: no worker can compute values of some samples alone."""
        return ""

    def scatter(self, state: PortableState, part: StatePart) -> None:
        """Collective. Load this worker's part of rank 0's portable state, or of a part of that."""
        if part is StatePart.ALL:
            self.state.scatter(state)
        else:
            self.state.scatter_weights(state, part is StatePart.SOME_WEIGHTS)

    def begin(self, batch: Any) -> None:
        """Seed what a training step draws, and put the model into training. Local: no collective."""
        self.computation.begin_step(batch.step)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self.update.begin()

    def changed_early(self) -> Sequence[Any]:
        """Return nothing: such jobs have a fixed number of workers, and end with a step that fails."""
        return ()

    def computed(self, evaluation: EvaluationMetrics) -> dict[str, float]:
        """Collective. Return the metrics of a whole evaluation, of which the last stages have the parts."""
        if not evaluation:
            return {}
        found: dict[str, float] = {}
        if self.layout.is_last:
            group, collectives = self.replicas()
            found = evaluation.computed(cast(Workers, group), collectives)
        computed: dict[str, float] = self.workers.broadcast_object(found, self.layout.stages - 1)
        return computed

    def own_form(self, training: bool) -> Form:
        """Return the names of the sums that the last step or evaluation had, if this is the last stage."""
        raise NotImplementedError

    def agreed_form(self, training: bool) -> Form:
        """Collective, the first time. Return the names of the sums, which the last stage knows.

        Raises:
            TaskError: If the last stage has others than before.
        """
        own = self.own_form(training)
        if training not in self.forms:
            self.forms[training] = self.workers.broadcast_object(own, self.layout.stages - 1)
        found = self.forms[training]
        if self.layout.is_last and own != found:
            raise TaskError(
                f"the task's metrics change from step to step: {', '.join(own[0])}, and before "
                f"{', '.join(found[0])}",
                "With stages, give the same metrics for every batch.",
            )
        return found


def _sent_of(found: DryRun) -> tuple[Any, dict[str, Any], str]:
    """Return what other workers are sent of a dry run; without outputs that cannot travel."""
    outputs = found.outputs
    try:
        wire.encode(outputs)
    except ExchangeError:
        outputs = None
    return outputs, dict(found.values), found.last_activation
