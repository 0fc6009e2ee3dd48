"""What both frameworks share of a worker that has a stage of a split model: its step, and its state.

The states of all stages are one portable state, gathered on rank 0 and given out again.
"""

import math
from bisect import bisect
from collections import UserDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.objective.losses import sample_values
from hvdtrain.backends.objective.model_call import ModelCall
from hvdtrain.backends.pipeline.checks import check_one_owner, check_outputs, owners_of, wrong_blocks
from hvdtrain.backends.pipeline.messages import Message, Messenger
from hvdtrain.backends.pipeline.pipeline import StageReducer, StandIn, WorkerGroup, first_blocks
from hvdtrain.backends.portable.initial_values import has_ema
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.portable.training_state import CommonState, Keeper
from hvdtrain.backends.records import DryRun, ModelInfo, PortableState, Shapes, StateArrays, StatePart
from hvdtrain.backends.reduction import choose_reducer
from hvdtrain.backends.step_metrics import PartialSums, PendingVector
from hvdtrain.backends.steps import WholeModelStep
from hvdtrain.backends.workers import group_of
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ExchangeError, HvdtrainError
from hvdtrain.storage.text import counted
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import WorkerPlace, Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

_END = Message(None, [])
Form = tuple[tuple[str, ...], tuple[str, ...]]


class RequestedState(UserDict[str, Any]):
    """A part of rank 0's state, of which another worker has one array in memory, when it requests that."""

    def __init__(self, names: Iterable[str], messenger: Messenger) -> None:
        super().__init__({name: name for name in names})
        self._messenger = messenger

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._messenger.send(Message(super().__getitem__(name), []), 0)
        return _array_of(self._messenger.receive(0))[1]


class StateOfStage(CommonState):
    """Model and optimizer of one stage as a part of a portable state; it stands before ``TrainingState``."""

    # returns all tensors that replicas have, with the path of the model's tensor that they belong to
    replicated: Any
    copy: Any  # collective in a group: copies a rank's tensors to the others

    def __init__(self, step: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._step, self._layout, self._workers = step, step.layout, step.workers
        self._messenger: Messenger = step.messenger

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy the state of all stages to rank 0, one array after the other.

        What several stages have, such as tied weights, is that of the first of them.
        """
        keeper = Keeper(folder if is_root else None)
        if not self._workers.broadcast_object(keeper.error is None):
            return keeper if is_root else None
        if is_root:
            receive = self._messenger.receive
            messages = (iter(partial(receive, rank), _END) for rank in range(1, self._layout.stages))
            keeper.keep_all(chain(self.arrays(), map(_array_of, chain.from_iterable(messages))))
            keeper.state |= kept
            return keeper
        if self._layout.replica == 0:
            for name, array in self.arrays():
                self._send_array(name, array, 0)
            self._messenger.send(_END, 0)
            self._messenger.flush()
        return None

    def scatter(self, state: PortableState | None, part: StatePart) -> None:
        """Collective. Check rank 0's whole state, or a part of it, and load this worker's part of that."""
        workers, messenger = self._workers, self._messenger
        is_part, load = part is StatePart.SOME_WEIGHTS, self.load
        if part is StatePart.ALL:
            expected = self.shapes(workers.broadcast_object(has_ema(state or {})))
        else:
            expected, load = self.weight_shapes(), partial(self.load_weights, is_part=is_part)
        of_ranks = workers.allgather_object(dict(expected))

        def check() -> list[str]:
            found = state or {}
            shapes = {name: tuple(shape) for wanted in of_ranks for name, shape in wanted.items()}
            if is_part:
                shapes = {name: shape for name, shape in shapes.items() if name in found}
            check_state(shapes, found, self.framework)
            return list(found)

        there = set(run_on_rank_zero(workers, check))
        names = [name for name in (*expected, *self.private_names()) if name in there]
        if workers.rank:
            try:
                load(RequestedState(names, messenger))
            finally:
                messenger.send(_END, 0)
                messenger.flush()
            return
        assert state is not None
        for rank in range(1, workers.size):
            for request in iter(partial(messenger.receive, rank), _END):
                self._send_array(request.description, state[request.description], rank)
        load({name: state[name] for name in names})

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Do nothing: rank 0 has checked the whole state."""

    def broadcast(self, others: Sequence[Any] = ()) -> None:
        """Collective. Copy what the first of those workers has that have the same to the others.

        ``others`` belong to no tensor of the model, such as counts of steps.
        """
        by_owners: dict[tuple[int, ...], list[Any]] = {(self._layout.stage,): list(others)}
        for path, tensor in self.replicated():
            having = tuple(self._step.owners.get(path, [self._layout.stage]))
            by_owners.setdefault(having, []).append(tensor)
        for having, tensors in sorted(by_owners.items(), key=lambda item: item[0]):
            if (group := self._step.groups[having]).size > 1:
                self.copy(tensors, group.first, group_of(group), f"stage.{'.'.join(map(str, having))}")

    def _send_array(self, name: str, array: NDArray[Any], to: int) -> None:
        """Send an array, and wait until it is sent: one at a time takes memory."""
        buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._messenger.send(Message((name, array.dtype.str, list(array.shape)), [buffer]), to)
        self._messenger.flush()


def _array_of(message: Message) -> tuple[str, NDArray[Any]]:
    name, dtype, shape = message.description
    return name, message.buffers[0].view(dtype).reshape(shape)


class StageStepBase(WholeModelStep):
    """The part of a stage's step that is the same in both frameworks; it stands before ``PlainStep``.

    ``groups`` are the workers that have some stages, by these: those that have this worker's stage, and those
    that share weights. ``owners`` are the stages that have a tensor, by its path.
    """

    is_timed, compared = False, ()  # no worker can compute values of some samples alone
    framework: str
    batch_norms: int
    parts_of_stage: tuple[Any, Any]  # its classes of the state and the update of a stage
    finish_with: Any  # returns what a function does, and the sum of a vector over all workers
    passes: Any
    state: StateOfStage
    module: Any  # what the framework does with blocks
    on_host: Any  # returns the numbers of a tensor
    first_of: Any  # returns the first micro-batch of a batch, on the host
    zeros: Any  # returns so many zeros on the device

    def __init__(self, task: Any, config: Config, workers: Workers, *arguments: Any) -> None:
        super().__init__(task, config, workers, *arguments)
        self._task, self._config = task, config
        self.layout = WorkerPlace(workers, config.stages)
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
        of_blocks = owners_of(
            self.framework, fields, [set(self.module.tensors_of([block])) for block in blocks]
        )
        sizes = [0] * len(blocks)
        for field, having in zip(fields, of_blocks, strict=True):
            for block in having:
                sizes[block] += math.prod(field.shape)
        firsts = first_blocks(sizes, layout.stages, config.stage_cuts)
        if batch is not None:
            compare = partial(self._compare, model, blocks, batch)
            self.notes.append(run_on_rank_zero(self.workers, compare, "comparing the blocks with the model"))
        ends = [*firsts[1:], len(blocks)]
        stage_of = [bisect(firsts, block) - 1 for block in range(len(blocks))]
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
            outputs = partial(self.module.outputs_of, model, blocks, call)
            return check_outputs(self.framework, outputs)
        except HvdtrainError:
            raise
        except Exception as error:  # of the task's code
            where = where_raised(error, own_only=True)
            problem = f"the model, or its blocks one after the other, fail for the first batch: {where}"
            raise wrong_blocks(self.framework, problem) from error

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
        parts.reducer = StageReducer(parts.reducer, shared, self.finish_with)
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
                rows = batch.samples.rows(place, len(passes.last_values[1]))
                computation.evaluation.add(passes.taken(), rows)
        before = 0.0 if partial is None else partial.weight
        sums = passes.sums if partial is None or passes.sums is None else partial.values + passes.sums
        return PartialSums(computation.names, computation.weighted, sums, before + batch.total_weight)

    def evaluated(self, partial: PartialSums, signals: Sequence[float]) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        names, weighted = form = self.agreed_form(False)
        self.messenger.flush()
        values = self.own_sums(partial.values, form)
        return super().evaluated(PartialSums(names, weighted, values, partial.weight), signals)

    def computed(self) -> dict[str, float]:
        """Collective. Return the metrics of a whole evaluation, of which the last stages have the parts."""
        evaluation = self.computation.evaluation
        if not evaluation:
            return {}
        found = evaluation.computed(self.near) if self.layout.is_last_stage else {}
        return self.workers.broadcast_object(found, self.layout.stages - 1)

    def own_sums(self, sums: Any, form: Form) -> Any:
        """Return this worker's sums of these names, which are zeros in stages before the last."""
        return self.zeros(sum(map(len, form))) if sums is None else sums

    def agreed_form(self, training: bool) -> Form:
        """Collective, in training once. Return the names of the sums, which the last stage knows."""
        if not training or training not in self.forms:
            own = self.passes.forms.get(training, ((), ()))
            self.forms[training] = self.workers.broadcast_object(own, self.layout.stages - 1)
        return self.forms[training]

    def dry_run(self, batch: Any, training: bool, draws: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Collective. Return loss and metrics of the first micro-batch, by name; the last stage has them."""
        passes, computation = self.passes, self.computation
        passes.begin(batch, training=training)
        if training:
            passes.train(1)
        else:
            passes.evaluate_next()
            if self.layout.is_last_stage:
                rows = batch.samples.rows(0, len(passes.last_values[1]))
                computation.evaluation.try_out(passes.taken(), rows)
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
        last, outputs = self.layout.stages - 1, found.outputs
        if self.workers.rank == last:
            try:
                wire.encode(outputs)
            except ExchangeError:  # they cannot travel
                outputs = None
        sent = outputs, dict(found.values), found.last_activation
        sent = self.workers.broadcast_object(sent if self.workers.rank == last else None, last)
        if self.layout.is_last_stage:
            return found
        # what a stage before the last returns are no outputs of the model
        outputs, values, last_activation = (None, {}, "") if self.layout.replica else sent
        return replace(found, outputs=outputs, values=values, last_activation=last_activation)

    def scatter(self, state: PortableState, part: StatePart) -> None:
        """Collective. Load this worker's part of rank 0's portable state, or of a part of that."""
        self.state.scatter(state, part)
