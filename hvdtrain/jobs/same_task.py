"""Whether a job's task and its options are those of a checkpoint, by whatever path each names them.

``config.yaml`` has absolute paths, a command line may have relative ones.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.jobs.run_directory.provenance import PATH_OPTIONS, last_start


def same_task(one: str, other: str) -> bool:
    """Return whether two tasks have one name, wherever they lie."""
    return _short(one) == _short(other)


def same_field(name: str, found: Checkpoint, now: Mapping[str, Any]) -> bool:
    """Return whether a field of a checkpoint's config means what it means in a job's, started in this folder.

    Args:
        name: the field.
        found: the checkpoint, whose paths start in the folder where its run was started.
        now: the job's config as a checkpoint has it.
    """
    before = found.manifest.config
    if before.get(name) == now.get(name):
        return True
    if name not in ("task", "task_options"):
        return False
    here = ""
    with suppress(OSError):  # without a working folder
        here = os.getcwd()
    folder = last_start(found.path.parent.parent).get("folder")
    there = folder if isinstance(folder, str) and folder else here
    return bool(_in_full(name, before, there) == _in_full(name, now, here))


def _in_full(name: str, config: Mapping[str, Any], folder: str) -> Any:
    """Return a config's task or its options with whole paths."""
    place, colon, class_name = str(config.get("task")).rpartition(":")
    if name == "task":
        is_module = colon and not place.endswith(".py") and "." not in place
        return (
            f"{_whole(folder, f'{place}.py' if is_module else place)}:{class_name}" if colon else class_name
        )
    options = config.get("task_options")
    if colon or not isinstance(options, Mapping):
        return options
    return {
        key: _whole(folder, value) if key in PATH_OPTIONS and isinstance(value, str) else value
        for key, value in options.items()
    }


def _whole(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))


def _short(task: str) -> str:
    """Return a task's name without the folder or package that it lies in."""
    place, _, name = task.rpartition(":")
    return f"{Path(place.removesuffix('.py').replace('.', '/')).name}:{name}"
