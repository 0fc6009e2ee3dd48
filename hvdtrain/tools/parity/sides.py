"""What `parity` observes of one framework's model: layers in evaluation, and the steps of a plain loop."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.base import Backend
from hvdtrain.backends.records import PortableState
from hvdtrain.config import Config
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import ENDINGS, HvdtrainError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import TaskData, build, open_together
from hvdtrain.jobs.opening.start import prepare, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.signals import interruptible
from hvdtrain.session import Session
from hvdtrain.tools.launch import layers_from_json, run_worker
from hvdtrain.tools.parity.observation import Array, ForwardPass, Observation
from hvdtrain.tools.parity.plain import PlainLoop, Samples, mean_of, steps_of
from hvdtrain.workers import wire
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.user_errors import where_raised

SAME_LOSS = 1e-5  # relative; a device may add numbers in another order in the second pass


def of_framework(framework: str) -> Any:
    """Return the module of this folder that looks into a framework's models."""
    return import_module(f"hvdtrain.tools.parity.{FRAMEWORKS[framework].module.split('.')[-2]}")


def open_loop(session: Session, task: Any, info: Any) -> PlainLoop:
    """Return a plain loop of the session's framework.

    Raises:
        TaskError: If the framework has no such optimizer.
    """
    loop: PlainLoop = of_framework(session.config.framework).Loop(task, session.config, session.backend, info)
    return loop


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


def observe(
    config: Config, backend: Backend, task_data: TaskData, start: PortableState | None, *, keeps_initial: bool
) -> Observation:
    """Return what a framework does with a model: in fp64 if the model can compute in it.

    Args:
        config: the config.
        backend: the framework.
        task_data: the task with its data.
        start: the parameters to begin with, after the model's own; those alone if not given.
        keeps_initial: whether training would begin with what the model's own initializers give.
    """
    with of_framework(config.framework).in_fp64():
        try:
            return _observe(config, backend, task_data, start, keeps_initial, is_wide=True)
        except ENDINGS:
            raise
        except Exception as error:
            problem = error.problem if isinstance(error, HvdtrainError) else where_raised(error)
            why = f"{FRAMEWORKS[config.framework].title}: {problem.splitlines()[0]}"
    found = _observe(config, backend, task_data, start, keeps_initial, is_wide=False)
    return replace(found, note=f"not compared in fp64, so smaller differences stay unseen: {why}")


def _observe(
    config: Config, backend: Backend, task_data: TaskData, start: Any, keeps_initial: bool, *, is_wide: bool
) -> Observation:
    task, own = task_data.task, PortableState()
    if keeps_initial:
        info = build(config.model_copy(update={"initial_parameters": "model"}), task, backend)
        own = _arrays(backend)
    info = build(config, task, backend)
    restore(config, backend, len(task_data.train_data))
    config = with_learning_rate(config, info.own_rates)
    task_data = replace(task_data, eval_data=None)
    with readers_for(config, task_data.train_data, None) as readers:
        session = new_session(config, backend, task_data, ResumePoint(), readers)
        loop = open_loop(session, task, info)
        initial = loop.start
        if start is not None:
            fits = {
                name: array for name, array in initial.items() if np.shape(start.get(name)) == array.shape
            }
            loop.restart({name: start[name] if name in fits else initial[name] for name in initial})
        batches = [
            ({name: _wide(array) if is_wide else array for name, array in samples.items()}, rate)
            for samples, rate in steps_of(session, session.plan().steps)
        ]
        found = _of_batch(loop, batches[0][0], config.framework)
        losses, arrays = {}, {}
        marks = {10**power for power in range(9)} | {len(batches)}
        for number, (samples, rate) in enumerate(batches, 1):
            losses[number] = loop.step(samples, number - 1, rate)
            if number in marks or not math.isfinite(losses[number]):
                arrays[number] = loop.arrays()
            if not math.isfinite(losses[number]):
                break
        settings = loop.settings() | (
            {} if config.learning_rate is None else {"learning rate": config.learning_rate}
        )
        return replace(
            found, initial=initial, own=own, losses=losses, arrays=arrays, optimizer=settings,
            batches=[_digest(samples) for samples, _ in batches], trained=tuple(loop.trained),
        )  # fmt: skip


def _arrays(backend: Backend) -> PortableState:
    pending = backend.gather_state()
    return {} if pending is None else {name: np.array(array) for name, array in pending.read().items()}


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _digest(samples: Samples) -> int:
    found = 0
    for name in sorted(samples):
        found = zlib.crc32(np.ascontiguousarray(samples[name]).tobytes(), zlib.crc32(name.encode(), found))
    return found


def _of_batch(loop: PlainLoop, samples: Samples, framework: str) -> Observation:
    """Return what the model does with a batch in evaluation, and whether its loss in training is random."""
    tools = of_framework(framework)
    fields = [(one.own, one.path) for one in loop.state.fields]
    paths = layer_paths(tools.paths_of(loop.model), fields, loop.renaming)
    passes, kept = [], loop.arrays()
    for _ in range(2):
        with tools.Recorder(loop.model, paths) as recorder:
            losses = loop.losses(samples, False)[0]
        passes.append(recorder.forward_pass(losses))
    rates = tools.stop_dropout(loop.model)
    means = [mean_of(loop.losses(samples, True))[0] for _ in range(2)]
    is_random = all(map(math.isfinite, means)) and not math.isclose(*means, rel_tol=SAME_LOSS)
    loop.restart(kept)
    random_layers = tuple(_random_layers(*passes))
    return Observation(framework, {}, {}, passes[0], random_layers, is_random, tuple(rates))


def _random_layers(first: ForwardPass, second: ForwardPass) -> Iterator[str]:
    """Yield the layer whose outputs differ between two passes; or before which something random is."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if not _same(one.inputs, other.inputs):
            yield f"before {one.path}"
            return
        if not _same(one.outputs, other.outputs):
            yield one.path
            return
    if not _same(first.outputs, second.outputs):
        yield "(outputs)"


def _same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def read_observation(path: Path) -> Observation:
    """Return what a process has written."""
    found: Observation = wire.decode(memoryview(path.read_bytes()), path.name)
    return found


def observe_alone(values: Mapping[str, Any]) -> None:
    """Observe a framework in a process of its own, and write what it found."""
    folder, start = Path(values["folder"]), None
    if values["start"]:
        start = read_observation(folder / values["start"]).initial
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers_from_json(values["layers"]))
        with started(job, signals) as backend:
            task_data, _, _ = open_together(job, backend)
            try:
                found = observe(job.config, backend, task_data, start, keeps_initial=values["keeps_initial"])
            except (HvdtrainError, *ENDINGS):
                raise
            except Exception as error:
                title = FRAMEWORKS[job.config.framework].title
                raise TaskError(
                    f"the model or the loss of {job.config.task} failed in {title}: {where_raised(error)}",
                    f"Train it in this framework first: --framework {job.config.framework}",
                ) from error
    (folder / f"{job.config.framework}.wire").write_bytes(wire.encode(found))
    (folder / f"{job.config.framework}.json").write_text("null", encoding="utf-8")


if __name__ == "__main__":
    run_worker(observe_alone)
