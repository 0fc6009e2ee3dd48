"""Split models: the place of a worker, the passes of a step, and the workers among whom sums are made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Literal

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.errors import ConfigError, EnvironmentFault, HvdtrainError, TaskError
from hvdtrain.storage.text import counted
from hvdtrain.workers.agreement import WorkerPlace

Pass = tuple[Literal["forward", "backward"], int]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of one stage: "forward" or "backward", and the micro-batch.

    It keeps the inputs of at most ``stages - stage`` micro-batches. Source: D. Narayanan et al., "PipeDream",
    2019, with the flush at the end of each step of "Memory-Efficient Pipeline-Parallel DNN Training", 2021.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for place in range(ahead):
        yield "forward", place
    for place in range(micro_batches):
        if place + ahead < micro_batches:
            yield "forward", place + ahead
        yield "backward", place


def bubble(stages: int, micro_batches: int) -> float:
    """Return the part of a step in which a stage waits, if all stages take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)


def cut(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the first block of each stage, so that the largest size of a stage is as small as possible."""
    count, sums = len(sizes), [0, *accumulate(sizes)]
    # of the first blocks up to each end: the largest size of a stage, and the first block of each stage
    best = {end: (sums[end], [0]) for end in range(1, count + 1)}
    for used in range(2, stages + 1):
        best = {
            end: min(
                (max(best[begin][0], sums[end] - sums[begin]), -begin, [*best[begin][1], begin])
                for begin in range(used - 1, end)
            )[::2]
            for end in range(used, count + 1)
        }
    return best[count][1]


def first_blocks(sizes: Sequence[int], stages: int, cuts: Sequence[int] | None) -> list[int]:
    """Return the first block of each stage: as ``cuts`` has them but for the first one's, or as ``cut``."""
    if len(sizes) < stages:
        raise TaskError(
            f"the model has {counted(len(sizes), 'block')}, which cannot be divided into {stages} stages",
            "Use fewer --stages or none, or let the task give more and smaller blocks.",
            everywhere=True,
        )
    if cuts is None:
        return cut(sizes, stages)
    firsts = [0, *cuts]
    if len(firsts) != stages or any(first >= end for first, end in pairwise([*firsts, len(sizes)])):
        raise ConfigError(
            f"stage_cuts {list(cuts)} does not divide {len(sizes)} blocks into {stages} stages",
            f"Give {stages - 1} increasing numbers from 1 to {len(sizes) - 1}: the first block of each later "
            "stage, from 0.",
            everywhere=True,
        )
    return firsts


Call = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a model or a block is called with


class StandIn:
    """What stands for the whole model where a stage is computed: ``run`` is called in its place."""

    def __init__(self, model: Any, stage: Any = None) -> None:
        self.__wrapped__, self._stage = model, stage
        self.run: Callable[..., Any] = lambda *arguments, **named: (arguments, named)  # to find those out

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call what stands for the model."""
        return self.run(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class StagePassesBase:
    """What a worker computes of the micro-batches of a step, and what it sends and waits for.

    A framework's class has the passes of a micro-batch, by its place in the step.
    """

    forward: Any  # returns the outputs of a call, and keeps what the backward pass needs
    backward: Any  # adds to the gradients, given those of the outputs; returns those of what was given
    compute_loss: Any  # does both passes of a call in the last stage; returns as ``backward`` does
    evaluate: Any  # returns the outputs of a call; in the last stage, takes in the metrics
    taken: Any  # returns what the last micro-batch gave to metrics of a whole evaluation, in the last stage
    sent: Any  # returns nested tensors as a message
    received: Any  # returns the tensors of a message
    weighted_sums: Any  # returns the sums of rows, given the weights

    def __init__(self, step: Any, whole: Any) -> None:
        self._computation, self._layout, self._update = step.computation, step.layout, step.update
        self._messenger, self._model_call = step.messenger, step.model_call
        self._given, self._called = StandIn(whole), StandIn(whole, step.computation.model)
        self._kept: dict[int, Any] = {}  # of each micro-batch, what its backward pass needs
        # in training or not: the names of the sums and of those with weights, which the last stage finds
        self.forms: dict[bool, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def begin(self, batch: Any, training: bool) -> None:
        """Begin a step, or the evaluation of a batch."""
        self._batch, self._place = batch, 0
        self.sums: Any = None  # in the last stage, the weighted sums of loss and metrics
        self.last_values: Any = None  # the rows of loss and metrics of the last micro-batch, and its weights
        self._kept.clear()
        computation = self._computation
        self._objective = computation.train_objective if training else computation.eval_objective

    def train(self, micro_batches: int) -> None:
        """Collective in the replica. Do the forward and backward passes of a step."""
        layout = self._layout
        with self._failure_sent():
            for what, place in one_forward_one_backward(layout.stage, layout.stages, micro_batches):
                if layout.is_last_stage and what == "forward":  # at once with the backward pass
                    self._send(self.compute_loss(place, self._call(place)), -1)
                elif what == "forward":
                    self._send(self.forward(place, self._call(place)), 1)
                elif not layout.is_last_stage:
                    self._send(self.backward(place, self._receive(1)), -1)
            self._messenger.flush()

    def evaluate_next(self) -> None:
        """Evaluate one micro-batch; stages before the last may be several ahead."""
        with self._failure_sent():
            place, self._place = self._place, self._place + 1
            self._send(self.evaluate(place, self._call(place)), 1)

    def counted(self, place: int) -> Any:
        """Return a micro-batch without padding, with its weights and gradient weights."""
        return self._batch.counted(place)

    def _call(self, place: int) -> Call:
        """Return what the stage is called with."""
        if not self._layout.is_first_stage:
            return (self._receive(-1),), {}
        call: Call = self._model_call(self._given, self.counted(place)[0])[0]
        return call

    def _add(self, rows: Any, weights: Any) -> None:
        self.last_values, sums = (rows, weights), self.weighted_sums(rows, weights)
        self.sums = sums if self.sums is None else self.sums + sums

    def _neighbour(self, by: int) -> int | None:
        """Return the rank of the worker with a stage before or after this one; None if there is none."""
        return self._layout.workers.rank + by if 0 <= self._layout.stage + by < self._layout.stages else None

    def _receive(self, by: int) -> Any:
        return self.received(self._messenger.receive(self._neighbour(by)))

    def _send(self, value: Any, by: int) -> None:
        if (rank := self._neighbour(by)) is not None:
            self._messenger.send(self.sent(value), rank)

    @contextmanager
    def _failure_sent(self) -> Iterator[None]:
        """Return a context whose exceptions let the neighbouring stages know that this one ends."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, HvdtrainError):
                error.everywhere = False  # other stages compute something else, and do not say it
            for by in (-1, 1):
                if (rank := self._neighbour(by)) is not None:
                    self._messenger.send_failure(rank)
            raise


_process_sets: dict[tuple[int, ...], Any] = {}  # Horovod's process sets of this process, by their ranks


class WorkerGroup(HorovodWorkers):
    """Collective. Some workers of a job: those that have one of some stages, the same on every worker."""

    def __init__(self, layout: WorkerPlace, stages: Sequence[int], host: str, collectives: Any) -> None:
        own, every = layout.workers.rank, range(layout.workers.size)
        ranks = [rank for rank in every if rank % layout.stages in stages]
        self.size, self.host, self.is_elastic = len(ranks), host, False
        self.first = ranks[0]  # the rank in the job of the first of them
        self.rank = ranks.index(own) if own in ranks else 0  # 0 if this worker is none of them
        self.process_set = _process_set_of(collectives().hvd, ranks)
        self.collectives = self._collectives = collectives(self)


def _process_set_of(hvd: Any, ranks: Sequence[int]) -> Any:
    """Collective. Return Horovod's set of some workers; None if it is one worker."""
    if len(ranks) == 1:
        return None
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    key = tuple(ranks)
    if key not in _process_sets:
        try:
            _process_sets[key] = hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise EnvironmentFault(
                f"stages: Horovod cannot make a set of the ranks {', '.join(map(str, ranks))}: {error}",
                "Train a split model in a process of its own: Horovod was started for another job.",
            ) from error
    return _process_sets[key]


class StageReducer(GradientReducer):
    """Sums gradients of a stage over its replicas, by ``own``; of shared weights by what ``shared`` has.

    ``finish_with`` sums a vector over all workers meanwhile, or afterwards.
    """

    def __init__(
        self, own: GradientReducer, shared: Mapping[str, GradientReducer], finish_with: Callable[..., Any]
    ) -> None:
        super().__init__(None)
        self._own, self._shared, self._finish_with = own, shared, finish_with

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Take the parameters. Local: no collective."""
        super().attach(parameters)
        self._parts = []
        for reducer in dict.fromkeys((self._own, *self._shared.values())):
            paths = [path for path in parameters if self._shared.get(path, self._own) is reducer]
            reducer.attach({path: parameters[path] for path in paths})
            self._parts += [(reducer, paths)] * bool(paths)

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Prepare for the next step. Local: no collective."""
        for reducer, _ in self._parts:
            reducer.follow(in_warmup, passes)

    def finish(self, gradients: Any, vector: Any = None) -> tuple[list[Any], Any]:
        """Collective. Return the sum of each gradient over those that have it, and of a vector over all."""
        by_path = dict(zip(self._parameters, gradients, strict=True))

        def sums() -> list[Any]:
            for reducer, paths in self._parts:
                found, _ = reducer.finish([by_path.pop(path) for path in paths])
                by_path.update(zip(paths, found, strict=True))
            return [by_path[path] for path in self._parameters]

        found: tuple[list[Any], Any] = self._finish_with(sums, vector)
        return found

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return self._own.describe()
