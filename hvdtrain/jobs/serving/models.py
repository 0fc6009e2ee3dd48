"""A checkpoint as a model: exported for serving, loaded as the framework's own, or made of its own file."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hvdtrain.backends.base import Backend
from hvdtrain.backends.portable.program import LARGEST_DIFFERENCE
from hvdtrain.backends.records import Exported
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.config.train_options import TrainOptions
from hvdtrain.config.values import EXPORT_FORMATS
from hvdtrain.data.eval_sets import first_set
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.readers import LocalFetch
from hvdtrain.data.stream import Stream
from hvdtrain.errors import NOT_THE_TASKS, CheckpointError, DataError, EnvironmentFault, TaskError, UsageError
from hvdtrain.host.output import quiet_output
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.setup import build, new_task, open_data, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, check_alone, prepare, started
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.serving.checkpoint import (
    Call,
    PathOrUrl,
    check_not_there,
    given_output,
    load_verified,
    opened,
    put_into_place,
    show,
    written_beside,
)
from hvdtrain.session import versions_with
from hvdtrain.storage.files import NotAFileError, check_link
from hvdtrain.storage.text import url_of
from hvdtrain.workers.seeding import seeded_frameworks

# how training computed is no part of a model that others serve
_OF_EXPORT = {"precision": "fp32", "checkpoint_activations": False, "compile": False}
_MOST_COMPARED = 1024  # samples of a batch, which a checkpoint from elsewhere may state far larger
_LINES = 3  # of a framework's error; they can be long


@dataclass(frozen=True)
class Export:
    """An export that was done."""

    checkpoint: Checkpoint  # what was exported
    is_ema: bool  # whether the moving average of its weights was
    format_name: str  # the format's name
    path: Path  # the file or directory
    exported: Exported  # the outcome of loading it back
    notes: tuple[str, ...] = ()  # what the user should know of the checkpoint

    def __repr__(self) -> str:
        """Return it in one line."""
        return f"<Export: {self.format_name}, {self.path}, of step {self.checkpoint.manifest.step:,}>"

    def describe(self) -> str:
        """Return what was written, how close its outputs are and how to load it, as text."""
        exported, manifest = self.exported, self.checkpoint.manifest
        batch = f", takes {exported.batch}" if exported.batch else ""
        keywords = ", ".join(f"{name}={name}" for name in exported.arguments)
        # a file with what lies next to it for it, or all of a folder
        parts = [self.path, *self.path.parent.glob(f"{self.path.name}.data"), *self.path.rglob("*")]
        size = sum(part.stat().st_size for part in parts if part.is_file())
        loading = EXPORT_FORMATS[self.format_name].loading.format(
            path=self.path,
            arguments="inputs" if exported.is_plain else keywords,
            keywords=keywords,
            mapping=", ".join(f'"{name}": {name}' for name in exported.arguments),
        )
        return "\n".join(
            [
                f"{self.format_name}: {self.path} ({size / 1e6:,.2f} MB{batch})",
                f"of {self.checkpoint.path}, step {manifest.step:,}{', EMA weights' * self.is_ema}",
                *(f"input: {text}" for text in exported.inputs),
                *(f"output: {text}" for text in exported.outputs),
                *(f"note: {text}" for text in (*self.checkpoint.notes(), *self.notes, *exported.notes)),
                f"loaded back, outputs differ by {exported.difference:.1e} at most, "
                f"{exported.relative:.1e} of the largest",
                *([f"compared on {exported.checked}"] if exported.checked else []),
                f"to load it: {loading}",
            ]
        )


def export(
    checkpoint: str | Path,
    to: str,
    task: Any = None,
    *,
    output: str | Path | None = None,
    force: bool = False,
    best: bool | str = False,
    **fields: Unpack[TrainOptions],
) -> Export:
    """Export a checkpoint's model for serving; the same as ``python -m hvdtrain export``. One worker.

    The export is loaded back and its outputs are compared with the model's on real samples.

    ``checkpoint``, ``task``, ``best``, ``fields`` and errors are those of ``evaluate``. ``to`` is the format,
    such as "onnx" or "keras" (``python -m hvdtrain export --help``). ``output`` is the file or directory to
    write, in ``exports/`` of the run directory if not given; ``force`` replaces one that is there.
    Returned is what was written, as ``path``, with ``describe()`` for how to load it.
    """
    if to not in EXPORT_FORMATS:
        raise UsageError(f"there is no export format {to!r}", f"Formats: {', '.join(EXPORT_FORMATS)}.")
    call = Call.of("export", checkpoint, task, fields, best=best)
    return export_checkpoint(call, to, None if output is None else given_output(output), force)


def export_checkpoint(
    call: Call, format_name: str, output: Path | None = None, force: bool = False
) -> Export:
    """Export a checkpoint, load it back, compare outputs on real samples, then put it into place."""
    row = EXPORT_FORMATS[format_name]
    missing = [one for one in row.packages if one not in sys.modules and find_spec(one) is None]
    if missing:
        raise EnvironmentFault(
            f"--to {format_name} needs {', '.join(row.packages)}; missing: {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )
    fixed = Layer(f"--to {format_name}", {"framework": row.framework, "device": "cpu"})
    ready = opened(call, "export", _OF_EXPORT, fixed=[fixed], is_alone=True)
    with ready as (job, backend, unverified):
        output = output or _default_output(unverified, job.config, format_name)
        if row.suffix and output.suffix != row.suffix:
            raise UsageError(f"--output {output}: a file of --to {format_name} ends with {row.suffix}")
        check_not_there(output, force, may_be_folder=not row.suffix)
        found, is_ema, notes, batches = _open(job, backend, call.place, unverified)
        with written_beside(output) as written:
            with quiet_output():
                exported = _write(job, backend, format_name, written, batches)
            _check_difference(exported, format_name)
            put_into_place(written, output)
    return Export(found, is_ema, format_name, output, exported, tuple(notes))


def _open(
    job: JobSpec, backend: Backend, place: PathOrUrl, found: Checkpoint
) -> tuple[Checkpoint, bool, list[str], list[HostBatch]]:
    """Build the model with the checkpoint's weights; read batches of several sizes from all of the data."""
    task = new_task(job)
    opened, _ = open_data(task, job.config, "eval_data")
    data = first_set(opened)
    if data is None:
        data, _ = open_data(task, job.config, "train_data")
    if data is None:
        raise DataError(f"task {job.config.task} has no data to compare outputs on")
    build(job.config, task, backend)
    found, is_ema, notes = load_verified(place, found, backend, job.config)
    read = LocalFetch(data, skip=job.config.on_bad_sample == "skip")
    size = min(max(job.config.eval_batch_size or job.config.batch_size, 2), _MOST_COMPARED)
    samples = 1 if isinstance(data, Stream) else len(data)  # that can be read by their index
    batches = []
    for start, count in ((0, size), (samples // 2, size), (max(0, samples - 2), 2), (samples // 3, 1)):
        indices = (start + np.arange(count, dtype=np.int64)) % samples
        arrays = {name: array[None] for name, array in read(indices)[0].items()}
        weights = np.ones((1, count), np.float32)
        batches.append(HostBatch(0, arrays, weights, float(count), indices[None]))
    return found, is_ema, notes, batches


def _write(
    job: JobSpec, backend: Backend, format_name: str, path: Path, batches: list[HostBatch]
) -> Exported:
    try:
        return backend.export(format_name, path, batches)
    except NOT_THE_TASKS:
        raise
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path.name}: {error.strerror or error}") from None
    except BaseException as error:
        message = "\n  ".join([line.strip() for line in str(error).splitlines() if line.strip()][:_LINES])
        raise TaskError(
            f"the model of task {job.config.task} cannot be exported as {format_name}: "
            f"{type(error).__name__}: {message}",
            f"Other formats: {', '.join(name for name in EXPORT_FORMATS if name != format_name)}. "
            "--debug shows all of it.",
        ) from error


def _check_difference(exported: Exported, format_name: str) -> None:
    if not exported.relative <= LARGEST_DIFFERENCE:
        raise EnvironmentFault(
            f"{format_name}: loaded back, outputs differ by {exported.difference:.1e}, "
            f"{exported.relative:.1e} of the largest; up to {LARGEST_DIFFERENCE:.0e} is rounding",
            "Nothing was written. Does the model compute with anything that is not in its state "
            "(attributes, random numbers)?",
        )


def _default_output(found: Checkpoint, config: Config, format_name: str) -> Path:
    """Return where an export goes if the user does not say it: a folder of the run directory."""
    if url_of(found.path):
        raise UsageError(f"nothing is exported to a store: {url_of(found.path)}", "Give an --output.")
    try:
        check_link(found.run_dir / "exports", found.run_dir)
    except NotAFileError as error:
        raise UsageError(f"{error.filename}: {error.strerror}", "Give an --output.") from None
    task = Path(config.task.rpartition(":")[2]).stem.lower()
    suffix = EXPORT_FORMATS[format_name].suffix or f"-{format_name}"
    return found.run_dir / "exports" / f"{task}-{found.path.name}{suffix}"


_OF_LOAD = {**_OF_EXPORT, "sync_batch_norm": False}


def load(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    best: bool | str = False,
    **fields: Unpack[TrainOptions],
) -> Any:
    """Return the model of a checkpoint, a ``torch.nn.Module`` or a ``keras.Model``, with its weights.

    These are their moving average if there is one. The model is on the CPU and in evaluation mode, as the
    task makes it. The task's data is not opened. The arguments, and errors, are those of ``evaluate``.
    """
    call = Call.of("load", checkpoint, task, {"device": "cpu", **fields}, framework=framework, best=best)
    with opened(call, "load", _OF_LOAD, is_alone=True) as (job, backend, found):
        build(job.config, new_task(job), backend)
        loaded, _, notes = load_verified(call.place, found, backend, job.config)
        trained = loaded.manifest.data.get("train_data")
        for name, columns in (trained.columns if trained else {}).items():
            notes.append(f"the model was trained with the columns {', '.join(columns)} of {name!r}")
        show("", notes)
        return backend.plain_model()


# ending of a file's name: the framework that saves such files
_TORCH, _KERAS = (".pt", ".pth", ".safetensors"), (".weights.h5", ".keras")
_FILE_ENDINGS = {**dict.fromkeys(_TORCH, "torch"), **dict.fromkeys(_KERAS, "tf")}


@dataclass(frozen=True)
class Imported:
    """Weights that became a checkpoint."""

    source: Path  # the file
    held: str  # what it held, as text
    path: Path  # the checkpoint
    config: Config  # the config that the model was built with

    def describe(self) -> str:
        """Return what was read and how to continue."""
        return (
            f"read {self.source}: {self.held}\n"
            f"checkpoint: {self.path}\n"
            f"to train from it: python -m hvdtrain --framework {self.config.framework} "
            f"--task {self.config.task} --init {self.path.parent}"
        )


def import_weights(
    weights: str | Path,
    output: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    **fields: Unpack[TrainOptions],
) -> Imported:
    """Convert PyTorch or Keras weights to a checkpoint; the same as ``python -m hvdtrain import``.

    One worker. Nothing in the file is executed. Training starts from the checkpoint with ``init``.

    Args:
        weights: a file that PyTorch (.pt, .pth, .safetensors) or Keras (.weights.h5, .keras) saved.
        output: the folder that the checkpoint goes into; holds none yet.
        task: the task as for ``evaluate``; the built-in task digits if not given.
        framework: "torch" or "tf"; the one whose file it is if not given.
        fields: config fields, such as ``task_options={...}`` and ``seed=1``.

    Returned is the checkpoint, as ``path``, with ``held``, what the file held as text.
    """
    call = Call.of("import_weights", given_output(weights), task, fields, framework=framework)
    return import_file(call, given_output(output))


def import_file(call: Call, output: Path) -> Imported:
    """Make a checkpoint of a framework's own file of weights: step 0, with a fresh optimizer."""
    path = Path(call.place)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} (looked in {Path.cwd()})")
    framework = next((one for suffix, one in _FILE_ENDINGS.items() if path.name.endswith(suffix)), "")
    if not framework:
        raise UsageError(f"{path.name}: of what kind is it?", f"Known endings: {', '.join(_FILE_ENDINGS)}.")
    if storage.checkpoints_in(output) or storage.checkpoints_in(output / CHECKPOINTS):
        raise UsageError(f"--output {output} has checkpoints already", "Give another folder.")
    with interruptible() as signals, seeded_frameworks():
        job = prepare(
            [Layer(path.name, {"framework": framework, "device": "cpu"}), *call.given], call.task_class
        )
        if job.config.framework != framework:
            raise UsageError(
                f"{path.name} is a file of --framework {framework}, not of {job.config.framework}",
                "A checkpoint fits both: import it with that one, then train with the other.",
            )
        with started(job, signals, stays=call.from_python) as backend:
            check_alone(backend, "import")
            held, made = _make(job, backend, path, output)
    return Imported(path, held, made, job.config)


def _make(job: JobSpec, backend: Backend, path: Path, output: Path) -> tuple[str, Path]:
    """Build the model, load the file and write the checkpoint; return what was loaded, and its directory."""
    task_data = open_task_data(job)
    build(job.config, task_data.task, backend)
    with quiet_output():
        held = backend.load_weights_file(path)
    try:
        pending = backend.gather_state()
        assert pending is not None  # this is the only worker
        output.parent.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            step=0,
            samples=0,
            data_size=len(task_data.train_data),
            seconds=0.0,
            workers=1,
            config=job.config.model_dump(mode="json"),
            versions=versions_with(backend),
        )
        made = storage.write(output, pending.read(), manifest)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    return held, made
