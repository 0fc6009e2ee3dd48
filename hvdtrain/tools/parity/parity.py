"""The command ``parity``: a task's PyTorch model and its TensorFlow model, each in a process of its own."""

import math
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config import Layer
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import ENDINGS, EXIT_DONE, EXIT_TRAINING, HvdtrainError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import check_is_not_launched
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.setup import TrainingRun, build, opened
from hvdtrain.jobs.opening.start import check_may_be_elastic, prepare, settle, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.storage.text import counted
from hvdtrain.tools.launch import LARGER_LIMIT, layers_from_json, layers_to_json, run_module, run_worker
from hvdtrain.tools.output import check_writable, said_if_interrupted, say, show_found
from hvdtrain.tools.parity.observation import OUTPUTS, Array, ForwardPass, Observation
from hvdtrain.tools.parity.plain import PlainLoop, Samples, mean_of, of_framework, steps_of
from hvdtrain.tools.parity.verdict import Result, judge
from hvdtrain.workers import wire
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.user_errors import where_raised

_SAME_LOSS = 1e-5  # relative; a device may add numbers in another order in the second pass
_DEFAULTS: dict[str, Any] = {"steps": 10, "initial_parameters": "portable"}
# what changes how a step is done and not what it computes, or is hvdtrain's own
_LEFT_OUT: dict[str, Any] = {
    "compile": False, "checkpoint_activations": False, "profile": None, "resume": None, "sync_every": None,
    "shard": "none", "stages": 1, "stage_cuts": None, "precision": "fp32", "compression": "none",
    "parameter_groups": (), "decay_norms_and_biases": True, "ema_decay": None, "mixup": 0.0, "cutmix": 0.0,
}  # fmt: skip


def describe(result: Result, task: str) -> str:
    """Return what was found."""
    lines = [f"parity: {task}"]
    if not result.can_compare:
        lines += [
            f"  {name}: {one or 'missing'} in PyTorch, {other or 'missing'} in TensorFlow"
            for name, one, other in result.unmatched
        ]
        lines += ["not compared: the models do not have the same parameters", *filter(None, result.notes)]
        return "\n".join(lines)
    width = max((len(row.path) for row in result.rows), default=0)
    for row in result.rows:
        kinds = " / ".join(dict.fromkeys([row.left.kind, row.right.kind]))
        apart = "other shape" if row.has_other_shape else f"{row.outputs.relative:.1e}" if row.outputs else ""
        lines.append(f"  {row.path:<{width}}  {apart:<11}  {kinds}".rstrip())
    numbers = asdict(result.steps) | {"others": result.steps.buffers}
    steps = ", ".join(f"{name} {numbers[name]:.1e}" for name in ("loss", "parameters", "others"))
    notes = [f"note: {note}" for note in result.notes]
    return "\n".join([*lines, f"  steps: {steps}, relative", *notes, *conclusion(result)])


def conclusion(result: Result) -> list[str]:
    """Return what was found, in sentences."""
    how = "in fp64" if result.is_wide else "in fp32"
    if result.has_parity:
        most = max((row.outputs.relative for row in result.rows if row.outputs is not None), default=0.0)
        return [f"parity: the models compute the same; outputs differ by {most:.1e} {how}: this is rounding"]
    lines = [f"first difference: {result.divergence}"] if result.divergence else []
    lines += [f"cause: {one.layer}: {one.suspect}: {one.text}" for one in result.findings]
    lines.append(f"no parity: {counted(len(result.findings), 'cause')} found")
    return [*lines, "further causes may show when this is mended: run parity again then"]


def to_document(result: Result) -> dict[str, Any]:
    """Return what was found as JSON has it."""
    return {
        "parity": result.has_parity, "fp64": result.is_wide, "notes": [*result.notes],
        "first_difference": result.divergence,
        "unmatched": [{"name": name, "torch": one, "tf": other} for name, one, other in result.unmatched],
        "findings": [asdict(one) for one in result.findings],
        "layers": [
            {"layer": row.path, "torch": row.left.kind, "tf": row.right.kind,
             "outputs": None if row.outputs is None else str(row.outputs.relative)}
            for row in result.rows
        ],
        "steps": {name: str(value) for name, value in asdict(result.steps).items()},
    }  # fmt: skip


def layers_for(layers: list[Layer], framework: str) -> list[Layer]:
    """Return the config values of one framework's side."""
    return [Layer("parity", _DEFAULTS), *layers, Layer("parity", {**_LEFT_OUT, "framework": framework})]


def check_task(task_class: Any, name: str) -> None:
    """Check that a task has what is compared, in both frameworks. No framework is loaded."""
    for row in FRAMEWORKS.values() if isinstance(task_class, type) else ():
        if not hasattr(task_class, row.model_method):
            raise TaskError(
                f"task {name} has no {row.model_method}(): parity compares the models of both frameworks",
                "Write it, with the same layers and the same names.",
            )
        if hasattr(task_class, row.step_method):
            raise TaskError(
                f"task {name} has {row.step_method}: parity compares losses, which its own step computes",
                "Leave it out for the comparison, and give the task a loss.",
            )


def layer_paths(
    walked: list[tuple[str, int]], arrays: Iterable[tuple[str, str]], renaming: Callable[[str], str]
) -> dict[int, str]:
    """Return the portable path of each layer, by its identity."""
    known: dict[str, str] = {}
    for own, portable in arrays:
        own_parts, parts = own.split("/"), portable.split("/")
        # an array's role may have several parts: those that both names end with are the same
        while own_parts and parts and own_parts[-1] == parts[-1]:
            own_parts, parts = own_parts[:-1], parts[:-1]
            known.setdefault("/".join(own_parts), "/".join(parts))
    found = {key: known[own] for own, key in reversed(walked) if own in known}  # the first one's counts
    for own, key in walked:
        found.setdefault(key, renaming(own) if own else "")
    return found


def observe(run: TrainingRun, start: Any) -> Observation:
    """Return what a framework does with a model: in fp64 if the model can compute in it."""
    with of_framework(run.config.framework).in_fp64():
        try:
            return _observe(run, start, wide=np.float64)
        except ENDINGS:
            raise
        except Exception as error:
            problem = error.problem if isinstance(error, HvdtrainError) else where_raised(error)
            why = f"{FRAMEWORKS[run.config.framework].title}: {problem.splitlines()[0]}"
    found = _observe(run, start, wide=None)
    return replace(found, note=f"not compared in fp64, so smaller differences stay unseen: {why}")


def _observe(run: TrainingRun, start: Any, *, wide: Any) -> Observation:
    task, backend = run.task_data.task, run.backend
    info = build(run.config, task, backend)
    run = replace(run, model=info, task_data=replace(run.task_data, eval_data=None))
    restore(run)
    config = run.config
    with readers_for(config, run.task_data.train_data, None) as readers:
        session = new_session(run, ResumePoint(), readers)
        loop: PlainLoop = of_framework(config.framework).Loop(task, config, backend, info)
        initial = loop.start
        if start is not None:
            fits = {name for name, array in initial.items() if np.shape(start.get(name)) == array.shape}
            loop.restart({name: start[name] if name in fits else initial[name] for name in initial})
        batches = [
            ({name: array.astype(wide) if wide and array.dtype.kind == "f" else array
              for name, array in samples.items()}, rate)
            for samples, rate in steps_of(session, session.plan().steps)
        ]  # fmt: skip
        found = _of_batch(loop, batches[0][0])
        losses, arrays = {}, {}
        marks = {10**power for power in range(9)} | {len(batches)}
        for number, (samples, rate) in enumerate(batches, 1):
            losses[number] = loop.step(samples, number - 1, rate)
            if number in marks or not math.isfinite(losses[number]):
                arrays[number] = loop.arrays()
            if not math.isfinite(losses[number]):
                break
        return replace(
            found, initial=initial, losses=losses, arrays=arrays, optimizer=type(loop.optimizer).__name__,
            batches=[zlib.crc32(wire.encode(dict(sorted(samples.items())))) for samples, _ in batches],
            trained=tuple(loop.trained),
        )  # fmt: skip


def _of_batch(loop: PlainLoop, samples: Samples) -> Observation:
    """Return what the model does with a batch in evaluation, and whether its loss in training is random."""
    tools = of_framework(loop.framework)
    fields = [(one.own, one.path) for one in loop.state.fields]
    paths = layer_paths(tools.paths_of(loop.model), fields, loop.renaming)
    passes, kept = [], loop.arrays()
    for _ in range(2):
        with tools.Recorder(loop.model, paths) as recorder:
            losses = loop.losses(samples, False)[0]
        passes.append(ForwardPass(tuple(recorder.calls), recorder.outputs, np.atleast_1d(losses)))
    rates = tools.stop_dropout(loop.model)
    means = [mean_of(loop.losses(samples, True))[0] for _ in range(2)]
    is_random = all(map(math.isfinite, means)) and not math.isclose(*means, rel_tol=_SAME_LOSS)
    loop.restart(kept)
    calls = zip(*(one.calls for one in passes), strict=False)
    random_layers = [
        *(a.path for a, b in calls if not (_same(a.inputs, b.inputs) and _same(a.outputs, b.outputs))),
        *(OUTPUTS for a, b in zip(*(one.outputs for one in passes), strict=False) if not _same(a, b)),
    ]
    return Observation(loop.framework, {}, passes[0], tuple(random_layers[:1]), is_random, tuple(rates))


def _same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def observe_alone(values: Mapping[str, Any]) -> bool:
    """Observe a framework in a process of its own, and write what it found into a folder."""
    folder = Path(values["folder"])
    start = _read(folder / values["start"]).initial if values["start"] else None
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers_from_json(values["layers"]))
        name, framework = job.config.task, job.config.framework
        with started(job, signals) as backend:
            run = opened(job, backend)
            try:
                found = observe(run, start)
            except (HvdtrainError, *ENDINGS):
                raise
            except Exception as error:
                raise TaskError(
                    f"the model or the loss of {name} failed in {FRAMEWORKS[framework].title}: "
                    f"{where_raised(error)}",
                    f"Train it in this framework first: --framework {framework}",
                ) from error
    (folder / f"{framework}.wire").write_bytes(wire.encode(found))
    return True


def _read(path: Path) -> Observation:
    found: Observation = wire.decode(memoryview(path.read_bytes()), path.name)
    return found


def run_parity(layers: list[Layer], json_path: Path | None, limit_seconds: float) -> int:
    """Compare a task's two models, show what was found, and return the exit code: 4 without parity."""
    check_may_be_elastic(None)
    check_is_not_launched("parity", "--task TASK")
    check_writable(json_path, layers=layers)
    task_class, config = settle(layers_for(layers, "torch"))
    check_task(task_class, config.task)
    found: list[Observation] = []
    with said_if_interrupted(), tempfile.TemporaryDirectory(prefix="hvdtrain-parity-") as name:
        for framework, title in (("torch", "PyTorch"), ("tf", "TensorFlow")):
            say(f"{title} ...")
            values = {
                "layers": layers_to_json(layers_for(layers, framework)), "folder": name,
                "start": "torch.wire" if found else "",
            }  # fmt: skip
            module, folder = "hvdtrain.tools.parity.parity", Path(name)
            run_module(title, [], module, values, folder, limit_seconds, remedy=LARGER_LIMIT)
            found.append(_read(Path(name, f"{framework}.wire")))
    result = judge(*found)
    show_found(describe(result, config.task), to_document(result), json_path)
    return EXIT_DONE if result.has_parity else EXIT_TRAINING


if __name__ == "__main__":
    run_worker(observe_alone)
