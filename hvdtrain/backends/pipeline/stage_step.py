"""What the steps of both frameworks share in which a worker has a stage of a split model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.pipeline.groups import Layout, StageGroups, TalkingGroup
from hvdtrain.backends.pipeline.messages import Messenger
from hvdtrain.backends.pipeline.pipeline import Pipeline
from hvdtrain.backends.pipeline.staged import Form
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.config import Config
from hvdtrain.errors import ExchangeError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers


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
