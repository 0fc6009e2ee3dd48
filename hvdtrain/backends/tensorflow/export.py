"""Keras models in formats for serving, and weights files of Keras.

``torch/export.py`` does the same for PyTorch.
"""

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective import Objective
from hvdtrain.backends.portable.files import Exported, check_fit, compare
from hvdtrain.backends.portable.trees import named_outputs
from hvdtrain.backends.tensorflow.program import TENSORS, batch_of, export_program, recorded, to_numpy
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError

Model = Any
Outputs = list[NDArray[Any]]

_MOST_TIMES = 10  # optimizers keep several numbers for each weight
_SPARE_BYTES = 1_000_000  # of an HDF5 file's own structure
_WEIGHTS_FILE = "model.weights.h5"  # in a .keras file, which is a zip archive


def export_model(  # noqa: PLR0917 - passed on by the backend as they are
    model: Model,
    objective: Objective,
    format_name: str,
    path: Path,
    batches: Sequence[HostBatch],
    serve: Callable[..., Any] | None = None,
) -> Exported:
    """Write a model, load it back and compare outputs.

    Args:
        model: the model, with its weights.
        objective: the task's, whose call of the model is what a program computes.
        format_name: "keras" or "saved-model".
        path: the file or directory.
        batches: real samples, in batches of several sizes; the largest first.
        serve: the task's own function of a model and a batch that a program is to compute.

    Raises:
        TaskError: If the model cannot be written in this format.
    """
    if format_name == "keras":
        model.save(path)
        return compare(*(_outputs(one, batches[0], objective) for one in (model, _load_back(path))))
    return export_program(model, objective, path, batches, serve)


def plain_model(model: Model) -> Model:
    """Return the model: no hooks of Horovod's optimizer are in it."""
    return model


def _load_back(path: Path) -> Model:
    try:
        return keras.models.load_model(path, compile=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"what was written cannot be loaded back: {str(error).partition(chr(10))[0][:300]}",
            "Register classes of your own with @keras.saving.register_keras_serializable(), or use "
            "--to saved-model.",
        ) from None


def _outputs(model: Model, batch: HostBatch, objective: Objective) -> Outputs:
    """Return the outputs of the calls that the task's loss makes, and what it returns."""
    recording = recorded(model, objective, batch_of(batch))
    values = [*(call.outputs for call in recording.calls), recording.result]
    return [to_numpy(t) for value in values for t in named_outputs(value, TENSORS)[0].values()]


def load_weights_file(model: Model, path: Path) -> str:
    """Load a file of weights into a model; say what was understood.

    Of a .keras file the weights are read, and nothing that says how to build a model.

    Raises:
        CheckpointError: If it is damaged, of an older Keras, or does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.weights.h5"
        model.save_weights(own)
        file = _weights_in(path, Path(folder), _MOST_TIMES * own.stat().st_size + _SPARE_BYTES)
        try:
            expected, found = _shapes(own), _shapes(file)
            check_fit(path, expected, found)
            model.load_weights(file)
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None
    numbers = sum(int(np.prod(shape)) for shape in found.values())
    return f"{len(found)} arrays, {numbers:,} numbers"


def _weights_in(path: Path, folder: Path, limit_bytes: int) -> Path:
    """Return the .weights.h5 file that a file is or holds; one that unpacks to more bytes is refused."""
    if path.suffix != ".keras":
        return path
    inside = folder / "file.weights.h5"
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(_WEIGHTS_FILE).file_size
            if size > limit_bytes:
                raise CheckpointError(
                    f"{path}: {_WEIGHTS_FILE} in it has {size:,} bytes; with the optimizer's state, this "
                    f"model's weights have at most {limit_bytes:,}",
                    "Import it with the task that has its model.",
                )
            archive.extract(_WEIGHTS_FILE, folder)
            (folder / _WEIGHTS_FILE).rename(inside)
    except (zipfile.BadZipFile, KeyError, OSError, EOFError) as error:
        raise _damaged(path, error) from None
    return inside


def _damaged(path: Path, error: Exception) -> CheckpointError:
    message = str(error).strip("'\"").partition("\n")[0]
    return CheckpointError(f"{path} is damaged or no file of weights: {message}")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's variables, by where Keras keeps them; the optimizer's are left out.

    Keras goes by kinds and order of layers, not by their names.
    """
    shapes = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            shapes[name] = tuple(item.shape)

    with h5py.File(path) as file:
        if "layer_names" in file.attrs or "model_weights" in file:
            raise CheckpointError(
                f"{path} is in Keras 2's format, which does not say where weights belong in a Keras 3 model",
                "Load it in a model of yours and save it anew: model.save_weights('x.weights.h5').",
            )
        file.visititems(visit)
    return shapes
