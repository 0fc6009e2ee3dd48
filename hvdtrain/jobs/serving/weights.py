"""The weights of a checkpoint alone: as the framework's own model, or made of a framework's own file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from hvdtrain.backends.base import Backend
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config, Layer
from hvdtrain.config.train_options import TrainOptions
from hvdtrain.errors import CheckpointError, EnvironmentFault, UsageError
from hvdtrain.host.output import quiet_output
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.setup import build, new_task, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, check_alone, prepare, started
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.serving.checkpoint import Call, given_output, load_verified, opened, show
from hvdtrain.session import versions_with
from hvdtrain.workers.seeding import seeded_frameworks

# how training computed is no part of the model
_PLAIN = {"precision": "fp32", "checkpoint_activations": False, "compile": False, "sync_batch_norm": False}


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
    with opened(call, "load", _PLAIN, is_alone=True) as (job, backend, found):
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
