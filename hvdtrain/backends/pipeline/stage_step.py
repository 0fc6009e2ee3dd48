"""What both frameworks share of a worker that has a stage of a split model."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from hvdtrain.backends.objective.losses import sample_values
from hvdtrain.backends.objective.model_call import ModelCall
from hvdtrain.backends.pipeline.checks import check_one_owner, owners_of, wrong_blocks
from hvdtrain.backends.pipeline.messages import Messenger
from hvdtrain.backends.pipeline.pipeline import Layout, StandIn, WorkerGroup, check_enough, cut, given_cuts
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StatePart
from hvdtrain.backends.reduction import choose_reducer
from hvdtrain.backends.step_metrics import PartialSums, PendingVector
from hvdtrain.backends.steps import WholeModelStep
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ExchangeError, HvdtrainError
from hvdtrain.storage.text import counted
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

Form = tuple[tuple[str, ...], tuple[str, ...]]


class StageStepBase(WholeModelStep):
    """The part of a stage's step that is the same in both frameworks; it stands before ``PlainStep``.

    ``groups`` are the workers that have some stages, by these: those that have this worker's stage, and those
    that share weights. ``owners`` are the stages that have a tensor, by its path.
    """

    is_timed = False
    framework: str
    near: Any
    batch_norms: int
    pending: Any  # the framework's class of metrics on their way from the device
    parts_of_stage: tuple[Any, Any, Any]  # its classes of the state, the update and the reducer of a stage
    passes: Any
    update: Any
    state: StateOfStage
    module: Any  # what the framework does with blocks
    on_host: Any  # returns the numbers of a tensor
    first_of: Any  # returns the first micro-batch of a batch, on the host
    summed: Any  # collective: returns the vector of an evaluation, of a worker's sums, if any, and signals
    own_form: Any  # returns the names of the sums of the last step or evaluation, if this is the last stage

    def __init__(self, task: Any, config: Config, workers: Workers, *arguments: Any) -> None:
        super().__init__(task, config, workers, *arguments)  # type: ignore[call-arg]
        self._task, self._config = task, config
        self.layout = Layout.of(workers, config.stages)
        self.messenger = Messenger()
        self.model_call = ModelCall(self.framework)
        self.notes: list[str] = []  # on what is not as on one worker
        # in training or not: the names of the sums and of those with weights, which the last stage finds
        self.forms: dict[bool, Form] = {}

    def divide(
        self, model: Any, blocks: Sequence[Any], whole: Any, batch: HostBatch | None, parameters: set[int]
    ) -> tuple[Sequence[Any], Any]:
        """Collective. Choose the stages; return the blocks of this worker's one, and its tensors."""
        fields, layout, config = whole.fields, self.layout, self._config
        check_enough(len(blocks), layout.stages)
        of_blocks = owners_of(
            self.framework, fields, [set(self.module.tensors_of([block])) for block in blocks]
        )
        sizes = [0] * len(blocks)
        for field, having in zip(fields, of_blocks, strict=True):
            for block in having:
                sizes[block] += math.prod(field.shape)
        if batch is not None:
            compare = partial(self._compare, model, blocks, batch)
            self.notes.append(run_on_rank_zero(self.workers, compare, "comparing the blocks with the model"))
        given = config.stage_cuts
        firsts = cut(sizes, config.stages) if given is None else given_cuts(given, len(blocks), config.stages)
        ends = [*firsts[1:], len(blocks)]
        stage_of = [stage for stage in range(layout.stages) for _ in range(firsts[stage], ends[stage])]
        owners = [sorted({stage_of[block] for block in having}) for having in of_blocks]
        owned = list(zip(fields, owners, strict=True))
        for field, having in owned:
            if any(id(tensor) not in parameters for tensor in field.tensors):
                check_one_owner(field.path, having)
        shared = {tuple(having) for having in owners if len(having) > 1}
        sets = [*((stage,) for stage in range(layout.stages)), *sorted(shared)]
        groups = {one: WorkerGroup(layout, one, self.workers.host, self.collectives) for one in sets}
        self.groups = {(layout.stage,): groups[layout.stage,], **{one: groups[one] for one in shared}}
        self.near = groups[layout.stage,]
        self.owners = {
            path: having for field, having in owned for path in getattr(field, "tensor_paths", (field.path,))
        }
        self.shapes = {field.name: field.shape for field in whole.trainable_fields()}
        trained = [(one.name, having) for one, having in owned if one.name in self.shapes]
        self._stage_shapes: list[Shapes] = [
            {name: self.shapes[name] for name, having in trained if stage in having}
            for stage in range(layout.stages)
        ]
        self._cuts = firsts, ends
        return blocks[firsts[layout.stage] : ends[layout.stage]], whole.part(
            [layout.stage in having for having in owners]
        )

    def _compare(self, model: Any, blocks: Sequence[Any], batch: HostBatch) -> str:
        """Check that blocks compute what their model does; return what they do otherwise in training."""
        try:
            call, _ = self.model_call(StandIn(model), self.first_of(batch))
            note: str = self.module.check_blocks(blocks, model, call)
        except HvdtrainError:
            raise
        except Exception as error:  # of the task's code
            where = where_raised(error, own_only=True)
            problem = f"the model, or its blocks one after the other, fail for the first batch: {where}"
            raise wrong_blocks(self.framework, problem) from error
        return note

    def replicas(self) -> tuple[Any, Any]:
        """Return those who have copies of this worker's state, and what moves objects between them."""
        return self.near, self.near.collectives

    def attach(self, parts: Any) -> None:
        """Take the parts of the step. Local: no collective."""
        groups = {stages: group for stages, group in self.groups.items() if len(stages) > 1}
        reducers: dict[Any, Any] = {one: choose_reducer(parts.config, group) for one, group in groups.items()}
        for stages, reducer in reducers.items():
            reducer.label = f"shared.{'.'.join(map(str, stages))}."
        several = {one.path: tuple(self.owners[one.path]) for one in parts.trainable}
        shared = {path: reducers[having] for path, having in several.items() if len(having) > 1}
        self._counted_elsewhere = {path for path, having in several.items() if having[0] != self.layout.stage}
        parts = copy(parts)
        parts.reducer = self.parts_of_stage[2](parts.reducer, shared)
        super().attach(parts)

    def make_update(self, parts: Any) -> Any:
        """Return the update of the stage."""
        return self.parts_of_stage[1](parts, self.layout, self._counted_elsewhere)

    def make_state(self) -> Any:
        """Make and return the state of this worker."""
        parts = self.parts
        self.state = self.parts_of_stage[0](self, parts.tensors, parts.optimizers, parts.ema)
        return self.state

    def evaluate(self, batch: Any, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Collective in the replica."""
        computation, passes = self.computation, self.passes
        if partial is None:
            computation.evaluation.begin()
        passes.begin(batch, training=False)
        for place in range(len(batch.samples.weights)):
            passes.evaluate_next()
            if computation.evaluation and self.layout.is_last_stage:
                computation.evaluation.add(passes.taken(), batch.samples.rows(place, passes.samples(place)))
        before = 0.0 if partial is None else partial.weight
        sums = passes.sums if partial is None or passes.sums is None else partial.values + passes.sums
        return PartialSums(computation.names, computation.weighted, sums, before + batch.total_weight)

    def evaluated(self, partial: PartialSums, signals: Sequence[float]) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        names, weighted = self.agreed_form(False)
        self.messenger.flush()
        vector = self.summed(partial.values, len(names) + len(weighted), signals)
        evaluation, computed = self.computation.evaluation, {}
        if evaluation:  # the last stages have its parts
            found = evaluation.computed(self.near) if self.layout.is_last_stage else {}
            computed = self.workers.broadcast_object(found, self.layout.stages - 1)
        found = {"computed": computed, "order": evaluation.order}
        pending: PendingVector = self.pending(names, vector, partial.weight, weighted=weighted, **found)
        return pending

    def agreed_form(self, training: bool) -> Form:
        """Collective, in training once. Return the names of the sums, which the last stage knows."""
        if not training or training not in self.forms:
            own, last = self.own_form(training), self.layout.stages - 1
            self.forms[training] = self.workers.broadcast_object(own, last)
        return self.forms[training]

    def try_out(self, batch: Any, training: bool) -> dict[str, NDArray[Any]]:
        """Collective. Return loss and metrics of the first micro-batch, by name; the last stage has them."""
        passes, computation = self.passes, self.computation
        passes.begin(batch, training=training)
        if training:
            passes.train(1)
        else:
            passes.evaluate_next()
            if self.layout.is_last_stage:
                computation.evaluation.try_out(passes.taken(), batch.samples.rows(0, passes.samples(0)))
            self.messenger.flush()
        if passes.last_values is None:
            return {}
        rows, weights = map(self.on_host, passes.last_values)
        return sample_values(computation.names, computation.weighted, rows, weights)

    def weight_shapes(self, own: Shapes) -> Shapes:
        """Collective. Return the shapes of the whole model's arrays, of which this worker has some."""
        of_ranks = self.workers.allgather_object(dict(own))
        return {name: tuple(shape) for shapes in of_ranks for name, shape in shapes.items()}

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of this worker's stage with what is known of the whole model."""
        lines = []
        for stage, (first, end, shapes) in enumerate(zip(*self._cuts, self._stage_shapes, strict=True), 1):
            which = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
            count = sum(map(math.prod, shapes.values()))
            lines.append(f"stage {stage}: {which}, {counted(count, 'parameter')}")
        info = replace(info, stages=tuple(lines), stage_shapes=tuple(self._stage_shapes))
        return replace(info, batch_norm_layers=self.batch_norms)

    def completed(self, found: DryRun, training: bool) -> DryRun:
        """Collective. Return what a dry run has found, with what the first replica's last stage has found."""
        if found.error is not None:
            return found
        if training:
            found = replace(found, note="; ".join(filter(None, [found.note, *self.notes])))
        last = self.layout.stages - 1
        sent = self.workers.broadcast_object(_sent_of(found) if self.workers.rank == last else None, last)
        if self.layout.is_last_stage:
            return found
        # what a stage before the last returns are no outputs of the model
        outputs, values, last_activation = (None, {}, "") if self.layout.replica else sent
        return replace(found, outputs=outputs, values=values, last_activation=last_activation)

    def find_comparing(self, batch: object, training: bool) -> str:
        """Return nothing: no worker can compute values of some samples alone."""
        return ""

    def scatter(self, state: PortableState, part: StatePart) -> None:
        """Collective. Load this worker's part of rank 0's portable state, or of a part of that."""
        self.state.scatter(state, part)


def _sent_of(found: DryRun) -> tuple[Any, dict[str, Any], str]:
    """Return what other workers are sent of a dry run; without outputs that cannot travel."""
    outputs = found.outputs
    try:
        wire.encode(outputs)
    except ExchangeError:
        outputs = None
    return outputs, dict(found.values), found.last_activation
