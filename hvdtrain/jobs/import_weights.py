"""Importing weights that another program saved: a checkpoint to start from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends import model_files
from hvdtrain.backends.base import Backend
from hvdtrain.backends.choice import ALL_WEIGHTS, Choice
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config, Layer
from hvdtrain.errors import CheckpointError, EnvironmentFault, UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.quiet import quiet_output
from hvdtrain.jobs.opening.setup import JobSpec, build, check_alone, open_task_data, prepare, started
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.serving.outputs import Place, local_file
from hvdtrain.jobs.signals import interruptible
from hvdtrain.session import versions_with
from hvdtrain.storage.urls import shown
from hvdtrain.workers.seeding import seeded_frameworks

# ending of a file's name: the framework that saves such files
_FILE_ENDINGS = {
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "torch",
    ".weights.h5": "tf",
    ".keras": "tf",
}

_TO_UPLOAD = (
    "Copy it to the store with the store's own client: model.safetensors and optimizer.safetensors first."
)


@dataclass(frozen=True)
class Imported:
    """Weights that became a checkpoint.

    Attributes:
        source: the file, or its URL.
        held: what it held, in words.
        path: the checkpoint.
        config: the config that the model was built with.
    """

    source: Place
    held: str
    path: Path
    config: Config

    def describe(self) -> str:
        """Return what was read and how to continue."""
        return (
            f"read {shown(self.source)}: {self.held}\n"
            f"checkpoint: {self.path}\n"
            f"to train from it: python -m hvdtrain --framework {self.config.framework} "
            f"--task {self.config.task} --init {self.path.parent}"
        )


def import_file(
    path: Place,
    given: list[Layer],
    output: Place,
    choice: Choice = ALL_WEIGHTS,
    *,
    task_class: Any = None,
    from_python: bool = False,
) -> Imported:
    """Make a checkpoint of a framework's own file of weights: step 0, with a fresh optimizer.

    One worker. Nothing in the file is executed.

    Args:
        path: a state_dict of PyTorch (.pt, .pth, .safetensors), or weights of Keras (.weights.h5, .keras);
            or the URL of one.
        given: the user's config layers, weakest first.
        output: the folder that the checkpoint goes into; holds none yet.
        choice: which part of the file is taken; the rest of the model has its initial values.
        task_class: the task's class if the caller has it.
        from_python: whether a script called: then Horovod stays if the import fails.

    Raises:
        CheckpointError: If the file is missing, damaged, needs code to be run, or does not fit.
        UsageError: If its kind is unknown or another framework's, or ``output`` has checkpoints.
        EnvironmentFault: If the file cannot be fetched, or the checkpoint not be written.
    """
    if isinstance(output, str):
        raise UsageError(
            f"--output {shown(output)}: the checkpoint is written to a directory of this host", _TO_UPLOAD
        )
    with local_file(path) as file:
        done = _import(file, given, output, choice, task_class=task_class, from_python=from_python)
    return replace(done, source=path)


def _import(
    path: Path, given: list[Layer], output: Path, choice: Choice, *, task_class: Any, from_python: bool
) -> Imported:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} (looked in {Path.cwd()})")
    framework = _framework_of(path)
    if storage.checkpoints_in(output) or storage.checkpoints_in(output / CHECKPOINTS):
        raise UsageError(f"--output {output} has checkpoints already", "Give another folder.")
    with interruptible() as signals, seeded_frameworks():
        job = prepare([Layer(path.name, {"framework": framework, "device": "cpu"}), *given], task_class)
        if job.config.framework != framework:
            raise UsageError(
                f"{path.name} is a file of --framework {framework}, not of {job.config.framework}",
                "A checkpoint fits both: import it with that one, then train with the other.",
            )
        with started(job, signals, stays=from_python) as backend:
            check_alone(backend, "import")
            held, made = _make(job, backend, path, output, choice)
    return Imported(path, held, made, job.config)


def _framework_of(path: Path) -> str:
    for suffix, framework in _FILE_ENDINGS.items():
        if path.name.endswith(suffix):
            return framework
    raise UsageError(f"{path.name}: of what kind is it?", f"Known endings: {', '.join(_FILE_ENDINGS)}.")


def _make(job: JobSpec, backend: Backend, path: Path, output: Path, choice: Choice) -> tuple[str, Path]:
    """Build the model, load the file and write the checkpoint; return what was loaded, and its directory."""
    task_data = open_task_data(job)
    build(job.config, task_data.task, backend)
    with quiet_output():
        held = model_files(backend, FRAMEWORKS[job.config.framework]).load_weights_file(path, choice)
    try:
        pending = backend.gather_state()
        assert pending is not None  # this is the only worker
        output.parent.mkdir(parents=True, exist_ok=True)
        made = storage.write(output, pending.read(), _manifest(job, backend, task_data.train_data))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    return held, made


def _manifest(job: JobSpec, backend: Backend, train_data: Any) -> Manifest:
    return Manifest(
        step=0,
        samples=0,
        data_size=len(train_data),
        seconds=0.0,
        workers=1,
        config=job.config.model_dump(mode="json"),
        versions=versions_with(backend),
    )
