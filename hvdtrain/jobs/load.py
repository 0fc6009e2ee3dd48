"""The model of a checkpoint, in Python."""

from pathlib import Path
from typing import Any

from hvdtrain.backends import model_files
from hvdtrain.config import Layer
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.best_checkpoint import chosen_checkpoint
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.failures import end_if_uncaught
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.setup import build, check_alone, new_task, prepare, started
from hvdtrain.jobs.serving.evaluate import checkpoint_path, given_layer, load_verified, print_note
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
            return model_files(backend, FRAMEWORKS[job.config.framework]).plain_model()
