"""What both frameworks share of a worker that has a stage of a split model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.pipeline.checks import describe_stages, shapes_of_stages
from hvdtrain.backends.pipeline.groups import Layout, StageGroups, TalkingGroup, stages_that_share
from hvdtrain.backends.pipeline.messages import Messenger
from hvdtrain.backends.pipeline.pipeline import Pipeline
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.step_metrics import PartialSums, PendingVector
from hvdtrain.config import Config
from hvdtrain.errors import ExchangeError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers

Form = tuple[tuple[str, ...], tuple[str, ...]]


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

    Attributes:
        workers: the job's workers.
        layout: the place of this worker.
        groups: the workers that have what this one has, after the model is made.
        owners: the stages that have a tensor, by its path, likewise.
    """

    is_timed, follows_trained = False, True
    collectives: Any  # the class of what moves objects through the framework's binding of Horovod
    pending: Any  # the framework's class of metrics on their way from the device
    state_kind: Any  # the framework's class of the state of a stage, a ``StateOfStage``
    hvd: Any  # the framework's binding of Horovod
    computation: Any
    parts: Any
    passes: Any
    groups: StageGroups
    owners: dict[str, list[int]]
    update: Any
    state: StateOfStage
    _batch_norms: int
    _stages: list[str]
    _firsts: list[int]
    _stage_shapes: list[dict[str, tuple[int, ...]]]

    def __init__(self, config: Config, workers: Workers) -> None:
        self.workers = workers
        self.layout = Layout.of(workers, config.stages)
        self.pipeline = Pipeline(self.layout, Messenger())
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
        collectives = self.collectives(self.groups.own)
        return TalkingGroup(self.groups.own, collectives), collectives

    def split(
        self,
        fields: Sequence[Any],
        trainable: Iterable[Any],
        owners: Sequence[Sequence[int]],
        blocks: int,
        paths: Callable[[Any], Iterable[str]],
    ) -> list[bool]:
        """Collective. Learn what each stage has; return of each portable array whether this worker has it.

        Args:
            fields: the whole model's portable arrays.
            trainable: those that are trained.
            owners: of each array the stages that have it.
            blocks: number of blocks.
            paths: returns the paths of the tensors of an array.
        """
        stages = self.layout.stages
        self.shapes = {field.name: field.shape for field in trainable}
        self.owners = {p: list(having) for f, having in zip(fields, owners, strict=True) for p in paths(f)}
        self.groups = StageGroups(self.hvd, self.layout, self.workers.host, stages_that_share(owners))
        self._stage_shapes = shapes_of_stages(fields, owners, self.shapes, stages)
        self._stages = describe_stages(self._firsts, blocks, self._stage_shapes)
        return [self.layout.stage in having for having in owners]

    def attach(self, parts: Any) -> None:
        """Take the parts of the step. Local: no collective."""
        parts.reducer.clock = parts.clock
        self.parts = parts
        reducers: dict[tuple[int, ...], Any] = {}
        for stages, group in self.groups.of_shared.items():
            reducers[stages] = choose_reducer(parts.config, group)
            reducers[stages].label = f"shared.{'.'.join(map(str, stages))}."
        self.begin_updates(
            {
                one.path: (reducers[tuple(having)], having[0] == self.layout.stage)
                for one in parts.trainable
                if len(having := self.owners[one.path]) > 1
            }
        )

    def begin_updates(self, shared: Mapping[str, tuple[GradientReducer, bool]]) -> None:
        """Make the update of the stage and its passes; ``SharedUpdate`` describes the argument."""
        raise NotImplementedError

    def make_state(self) -> Any:
        """Make and return the state of this worker."""
        parts = self.parts
        self.state = self.state_kind(
            self.layout,
            self.workers,
            self.pipeline.messenger,
            self.groups,
            self.owners,
            *(parts.tensors, parts.optimizers, parts.ema),
        )
        return self.state

    def evaluate(self, batch: Any, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Collective in the replica."""
        computation, passes = self.computation, self.passes
        if partial is None:
            computation.evaluation.begin()
        passes.begin(batch, training=False)
        for place in range(len(batch.samples.weights)):
            self.pipeline.evaluate(passes)
            if computation.evaluation and self.layout.is_last:
                computation.evaluation.add(passes.taken(), batch.samples.rows(place, passes.samples(place)))
        before = 0.0 if partial is None else partial.weight
        sums = self.zeros(0) if passes.sums is None else passes.sums
        if partial is not None and passes.sums is not None:
            sums = partial.values + sums
        return PartialSums(computation.names, computation.weighted, sums, before + batch.total_weight)

    def evaluated(self, partial: PartialSums, signals: Sequence[float]) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        self.forms.pop(False, None)
        names, weighted = self.agreed_form(False)
        self.pipeline.messenger.flush()
        own = partial.values if self.layout.is_last else self.zeros(len(names) + len(weighted))
        vector = self.summed(own, signals)
        evaluation = self.computation.evaluation
        found = {"computed": self.computed(evaluation), "order": evaluation.order}
        pending: PendingVector = self.pending(names, vector, partial.weight, weighted=weighted, **found)
        return pending

    def zeros(self, count: int) -> Any:
        """Return a vector of zeros on the CPU."""
        raise NotImplementedError

    def summed(self, own: Any, signals: Sequence[float]) -> Any:
        """Collective. Return the vector of an evaluation, summed over workers, of this worker's sums."""
        raise NotImplementedError

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
