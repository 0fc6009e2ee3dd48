"""What is done with a model to observe it; each framework's ``probe.py`` has a class that can do so."""

import math
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import PortableState
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.session import Session
from hvdtrain.tools.parity.observation import ForwardPass, Observation, StepState
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY


def layer_paths(
    walked: Iterable[tuple[str, int]], arrays: Iterable[tuple[str, str]], renaming: Callable[[str], str]
) -> dict[int, str]:
    """Return the portable path of each layer, by its identity.

    A layer is found under several own paths where it is shared; the one that its arrays go by is taken.

    Args:
        walked: own path and identity of each layer, from the model down.
        arrays: own and portable name of each array.
        renaming: the task's names.
    """
    known: dict[str, str] = {}
    for own, portable in arrays:
        own_parts, parts = own.split("/"), portable.split("/")
        # an array's role may have several parts: those that both names end with are the same
        while own_parts and parts and own_parts[-1] == parts[-1]:
            own_parts, parts = own_parts[:-1], parts[:-1]
            known.setdefault("/".join(own_parts), "/".join(parts))
    found: dict[int, str] = {}
    is_known: set[int] = set()
    for own, key in walked:
        if own in known and key not in is_known:
            found[key] = known[own]
            is_known.add(key)
        elif key not in found:
            found[key] = renaming(own) if own else ""
    return found


Arrays = Mapping[str, NDArray[Any]]

# relative; a device may add numbers in another order in the second pass
_SAME_LOSSES = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


class Probe(ABC):
    """Looks into a model that a backend has built. All of it is local, and leaves the model as it was.

    Args:
        backend: the backend.
        task: the task.
        config: the config.
        named: the framework's losses and metrics by name.
    """

    def __init__(self, backend: Backend, task: Any, config: Config, named: Mapping[str, Any]) -> None:
        self._backend: Any = backend
        self._model = self._backend.model
        self._framework, self._precision = config.framework, config.precision
        self._objective = make_objective(task, config.framework, named)
        self._train_objective = make_objective(task, config.framework, named, config.label_smoothing)
        self._renaming = Renaming(task, config.framework)

    @abstractmethod
    def forward(self, arrays: Arrays) -> tuple[ForwardPass, ForwardPass]:
        """Return two forward passes in evaluation with the same samples."""

    def stop_dropout(self) -> list[float]:
        """Let dropout layers drop nothing from now on; return the rates that they had."""
        rates: list[float] = _module(self._framework).stop_dropout(self._model)
        return rates

    @abstractmethod
    def losses_in_training(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, float]:
        """Return the mean losses of two passes in training, which draw random numbers one after the other.

        Args:
            arrays: the samples.
            weights: their weights.
        """

    @abstractmethod
    def gradients(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, PortableState]:
        """Return the mean loss in training and its gradient by portable names.

        Args:
            arrays: the samples.
            weights: their weights.
        """

    @abstractmethod
    def optimizer(self) -> dict[str, Any]:
        """Return what the optimizer was made with, under names that both frameworks share."""


def make_probe(backend: Backend, task: Any, config: Config) -> Probe:
    """Return what looks into the backend's model."""
    probe: Probe = _module(config.framework).Probe(backend, task, config)
    return probe


def in_fp64(framework: str) -> Any:
    """Return a context in which the framework makes models that compute in fp64."""
    return _module(framework).in_fp64()


def _module(framework: str) -> Any:
    folder = FRAMEWORKS[framework].module.split(".")[-2]
    return import_module(f"hvdtrain.tools.parity.{folder}")


def steps_to_compare(steps: int) -> tuple[int, ...]:
    """Return the steps after which models are compared: powers of ten, and the last."""
    powers = (10**power for power in range(len(str(steps))))
    return tuple(sorted({step for step in powers if step < steps} | {steps}))


def try_out(session: Session, probe: Probe) -> None:
    """Let a model that computes in fp64 do a forward pass and a training pass. Local: no collective."""
    found = session.data.train_batch(session.plan(), Progress())
    assert found is not None  # a training has at least one step
    first = _widened(found)
    probe.forward(_samples(first))
    probe.gradients(_samples(first), first.weights[0])


def observe(session: Session, probe: Probe, *, is_fp64: bool = False) -> Observation:
    """Collective. Return what a model does with the first batch, and in training.

    Args:
        session: the run, with its model built, before its first step.
        probe: what looks into the model.
        is_fp64: whether the model computes in fp64, and is to be given such numbers.
    """
    plan = session.plan()
    found = session.data.train_batch(plan, Progress())
    assert found is not None  # a training has at least one step
    first = _widened(found) if is_fp64 else found
    ACTIVITY.enter("comparing the forward pass", is_long=True)
    forward, again = probe.forward(_samples(first))
    dropout_rates = probe.stop_dropout()
    losses = probe.losses_in_training(_samples(first), first.weights[0])
    most = _SAME_LOSSES["fp64" if is_fp64 else session.config.precision]
    is_random = all(map(math.isfinite, losses)) and not math.isclose(*losses, rel_tol=most)
    marks = steps_to_compare(plan.steps)
    rate = session.config.learning_rate
    rates = {} if rate is None else {"learning rate": float(np.float32(rate))}  # Keras keeps it in 32 bits
    states, batches = _train(session, probe, marks, is_fp64)
    return Observation(
        framework=session.config.framework,
        forward=forward,
        random_layers=tuple(_random_layers(forward, again)),
        is_random_in_training=is_random,
        dropout_rates=tuple(dropout_rates),
        steps=tuple(states),
        optimizer=probe.optimizer() | rates,
        batches=batches,
        targets=_samples(first).get("targets"),
        trained=tuple(states[0].gradients) if states else (),
    )


def _train(
    session: Session, probe: Probe, marks: Sequence[int], is_fp64: bool
) -> tuple[list[StepState], dict[int, int]]:
    """Collective. Train; return the steps that are compared, and a digest of each batch."""
    plan, backend = session.plan(), session.backend
    states: list[StepState] = []
    batches: dict[int, int] = {}
    waiting: deque[HostBatch] = deque()

    def given(feed: Any) -> Iterator[HostBatch]:
        for batch in feed:
            waiting.append(_widened(batch) if is_fp64 else batch)
            yield waiting[-1]

    with session.data.train_feed(plan, session.state.progress) as feed:
        for batch in backend.to_device(given(feed)):
            host, step = waiting.popleft(), session.state.progress.step + 1
            ACTIVITY.enter("in training step", step=step)
            batches[step] = _digest(host)
            gradients = probe.gradients(_samples(host), host.weights[0])[1] if step in marks else {}
            rate = session.learning_rate(plan)
            loss = backend.train_step(batch, rate).read().mean("loss")
            session.advance(plan, rate, host.total_weight)
            if step in marks or not math.isfinite(loss):
                states.append(StepState(step, loss, gradients, _model_arrays(backend)))
            if step == marks[-1] or not math.isfinite(loss):
                break
    return states, batches


def _model_arrays(backend: Backend) -> PortableState:
    """Collective. Return the model's arrays on rank 0, nothing on other ranks."""
    pending = backend.gather_state()
    return model_part({} if pending is None else pending.read())


def model_part(state: PortableState) -> PortableState:
    """Return copies of the arrays of a state that are the model's."""
    return {name: np.array(array) for name, array in state.items() if name.startswith("model/")}


def _samples(batch: HostBatch) -> dict[str, NDArray[Any]]:
    return {name: array[0] for name, array in batch.arrays.items()}


def _widened(batch: HostBatch) -> HostBatch:
    arrays = {
        name: array.astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in batch.arrays.items()
    }
    return replace(batch, arrays=arrays)


def _digest(batch: HostBatch) -> int:
    found = zlib.crc32(np.ascontiguousarray(batch.indices).tobytes())
    for name in sorted(batch.arrays):
        found = zlib.crc32(
            np.ascontiguousarray(batch.arrays[name]).tobytes(), zlib.crc32(name.encode(), found)
        )
    return found


def _random_layers(first: ForwardPass, second: ForwardPass) -> Iterator[str]:
    """Yield layers whose outputs differ between two passes though their inputs do not.

    If what is random is no layer, the layer that is given it is named.
    """
    for one, other in zip(first.calls, second.calls, strict=False):
        if not _same(one.inputs, other.inputs):
            yield f"before {one.path}"
            return
        if not _same(one.outputs, other.outputs):
            yield one.path
            return
    if not _same(first.outputs, second.outputs):
        yield "(outputs)"


def _same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
