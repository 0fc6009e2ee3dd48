"""The commands export, import and predict as functions, for scripts and notebooks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hvdtrain.backends.base import model_files
from hvdtrain.backends.choice import Choice
from hvdtrain.config import Layer
from hvdtrain.config.values import EXPORT_FORMATS
from hvdtrain.errors import UsageError
from hvdtrain.host.launcher import muted_console, open_console
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.failures import end_if_uncaught
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.setup import build, new_task
from hvdtrain.jobs.opening.start import check_alone, prepare, started
from hvdtrain.jobs.serving.checkpoint import Imported, chosen_checkpoint, import_file
from hvdtrain.jobs.serving.evaluate import checkpoint_path, given_layer, given_path, load_verified, print_note
from hvdtrain.jobs.serving.export import Export, export_checkpoint
from hvdtrain.jobs.serving.predict import SPLITS, predict_arrays, predict_checkpoint
from hvdtrain.jobs.signals import interruptible
from hvdtrain.task import task_class_of
from hvdtrain.workers.seeding import seeded_frameworks

# how training computed is no part of the model
_PLAIN = Layer(
    "load",
    {"precision": "fp32", "checkpoint_activations": False, "compile": False, "sync_batch_norm": False},
)


def load(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    best: bool | str = False,
    **fields: Any,
) -> Any:
    """Return the model of a checkpoint with its weights, or their moving average if there is one.

    It is on the CPU and in evaluation mode, as the task makes it. The task's data is not opened.

    Args:
        checkpoint: a checkpoint's directory, or a run's for its newest good one; or its URL.
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it. The
            checkpoint's if not given; must be given if that is not a built-in one.
        framework: "torch" or "tf"; the one that trained it if not given.
        best: of a run, take the best checkpoint that is kept: True by the metric that the run kept the best
            of, or by the loss; or a metric, written as for ``keep_best``.
        fields: config fields that are to differ from the checkpoint's, such as ``task_options={...}``.

    Returns:
        A ``torch.nn.Module`` or a ``keras.Model``.

    Raises:
        UsageError: If there are several workers.
        HvdtrainError: as ``hvdtrain.evaluate`` raises them.
    """
    end_if_uncaught()
    given = given_layer("load", task, framework, {"device": "cpu", **fields})
    task_class, path = task_class_of(task), chosen_checkpoint(checkpoint_path(checkpoint), best)
    with interruptible() as signals, seeded_frameworks():
        found = checkpoint_config.find_unverified(path)
        job = prepare(checkpoint_config.layers_of(found, [_PLAIN, given]), task_class)
        check(Job(job.config, command="load"))
        with started(job, signals, stays=True) as backend:
            check_alone(backend, "load")
            build(job.config, new_task(job), backend)
            loaded, _, notes = load_verified(path, found, backend, job.config)
            trained = loaded.manifest.data.get("train_data")
            for name, columns in (trained.columns if trained else {}).items():
                notes.append(f"the model was trained with the columns {', '.join(columns)} of {name!r}")
            for note in notes:
                print_note(open_console(), note)
            return model_files(backend).plain_model()


def export(
    checkpoint: str | Path,
    to: str,
    task: Any = None,
    *,
    output: str | Path | None = None,
    force: bool = False,
    best: bool | str = False,
    **fields: Any,
) -> Export:
    """Export a checkpoint's model for serving; the same as ``python -m hvdtrain export``.

    One worker. The export is loaded back and its outputs are compared with the model's on real samples.

    Args:
        checkpoint: a checkpoint's directory, or a run's for its newest good one; or its URL.
        to: the format, which determines the framework: "safetensors", "pt", "onnx", "keras", "saved-model" or
            another one that ``python -m hvdtrain export --help`` lists.
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it. The
            checkpoint's if not given; must be given if that is not a built-in one.
        output: the file or directory to write; in ``exports/`` of the run directory if not given.
        force: replace an export that is there.
        best: of a run, take the best checkpoint that is kept: True by the metric that the run kept the best
            of, or by the loss; or a metric, written as for ``keep_best``.
        fields: config fields that are to differ from the checkpoint's, such as ``task_options={...}``.

    Returns:
        What was written, as ``path``, with ``describe()`` for how to load it.

    Raises:
        UsageError: If the format is unknown, the output exists, or there are several workers.
        HvdtrainError: as ``hvdtrain.evaluate`` raises them.
    """
    end_if_uncaught()
    if to not in EXPORT_FORMATS:
        raise UsageError(f"there is no export format {to!r}", f"Formats: {', '.join(EXPORT_FORMATS)}.")
    path = chosen_checkpoint(checkpoint_path(checkpoint), best)
    return export_checkpoint(
        path,
        to,
        [given_layer("export", task, None, fields)],
        None if output is None else given_path(output),
        force,
        task_class=task_class_of(task),
        from_python=True,
    )


def import_weights(
    weights: str | Path,
    output: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    **fields: Any,
) -> Imported:
    """Convert PyTorch or Keras weights to a checkpoint; the same as ``python -m hvdtrain import``.

    One worker. Nothing in the file is executed. Training starts from the checkpoint with ``init``.

    Args:
        weights: a file that PyTorch (.pt, .pth, .safetensors) or Keras (.weights.h5, .keras) saved.
        output: the folder that the checkpoint goes into; holds none yet.
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it; the
            built-in task digits if not given.
        framework: "torch" or "tf"; the one whose file it is if not given.
        only: patterns of names; only the weights that match one, here or in the file, are taken.
        skip: patterns of names; the weights that match one are left out.
        fields: config fields, such as ``task_options={...}`` and ``seed=1``.

    Returns:
        The checkpoint, as ``path``, with ``held``, what the file held in words.

    Raises:
        UsageError: If the kind of the file is unknown, ``output`` has checkpoints, or there are several
            workers.
        HvdtrainError: as ``hvdtrain.evaluate`` raises them.
    """
    end_if_uncaught()
    choice = Choice(_patterns(only), _patterns(skip), options=("only", "skip"))
    return import_file(
        given_path(weights),
        [given_layer("import_weights", task, framework, fields)],
        given_path(output),
        choice,
        task_class=task_class_of(task),
        from_python=True,
    )


def predict(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    output: str | Path | None = None,
    split: str | None = None,
    force: bool = False,
    best: bool | str = False,
    quiet: bool = False,
    **fields: Any,
) -> dict[str, NDArray[Any]] | Path | str:
    """Return a model's outputs for every sample; the same as ``python -m hvdtrain predict``.

    Collective: every worker of the job calls it.

    Args:
        checkpoint: a checkpoint's directory, or a run's for its newest good one; or its URL.
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it. The
            checkpoint's if not given; must be given if that is not a built-in one.
        framework: "torch" or "tf"; the one that trained it if not given.
        output: a file to write them to, which ends with ``.npz`` or ``.parquet``; without one they are
            returned, and must fit into the memory of each worker.
        split: "train", "eval" or "predict", the data of the task; its ``predict_data()`` if it has one and
            else its evaluation data if not given.
        force: replace a file that is there.
        best: of a run, take the best checkpoint that is kept: True by the metric that the run kept the best
            of, or by the loss; or a metric, written as for ``keep_best``.
        quiet: show nothing on the console.
        fields: config fields that are to differ from the checkpoint's, such as ``eval_batch_size=64``.

    Returns:
        Name to array, with a row for each sample in the order of the data: the same on every worker. The
        file's path or URL if ``output`` is given.

    Raises:
        UsageError: If the output exists or has the wrong ending, or there is no such split.
        HvdtrainError: as ``hvdtrain.evaluate`` raises them.
    """
    end_if_uncaught()
    if split is not None and split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", f"Splits: {', '.join(SPLITS)}.")
    path = chosen_checkpoint(checkpoint_path(checkpoint), best)
    given, task_class = [given_layer("predict", task, framework, fields)], task_class_of(task)
    with muted_console(quiet):
        if output is None:
            return predict_arrays(path, given, split, task_class)
        file = given_path(output)
        predict_checkpoint(path, given, file, split, force, task_class=task_class, from_python=True)
        return file


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
