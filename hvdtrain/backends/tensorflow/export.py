"""Keras models in formats for serving, and weights files of Keras.

``torch/export.py`` does the same for PyTorch.
"""

import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.portable.files import check_fit, compare
from hvdtrain.backends.portable.partial import remedy_for_misfits, select
from hvdtrain.backends.records import ALL_WEIGHTS, Choice, Exported
from hvdtrain.backends.tensorflow.program import CALLS, TENSORS, write_program
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.task_model import take_loss
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError

Model = Any

_EXACT = ("float32", "float64", "int32", "int64", "uint32")
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

    The format is "keras" or "saved-model".
    """
    if format_name == "keras":
        model.save(path)
        batch = CALLS.batch_of(batches[0])
        pair = (CALLS.recorded(one, objective, batch) for one in (model, _load_back(path)))
        return compare(*(one.arrays(TENSORS) for one in pair))
    write, otherwise = partial(write_program, model, path), "Or export the whole model: --to keras."
    return CALLS.export(model, objective, batches, serve, otherwise, write)


def plain_model(model: Model) -> Model:
    """Return the model, without a loss that was trained with it."""
    take_loss(model)
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


def load_weights_file(
    model: Model, path: Path, choice: Choice = ALL_WEIGHTS, fields: Sequence[Field] = ()
) -> str:
    """Load a file of weights into a model; say what was understood.

    Of a .keras file the weights are read, and nothing that says how to build a model.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.weights.h5"
        model.save_weights(own)
        file = _weights_in(path, Path(folder))
        try:
            expected, found = _shapes(own), _shapes(file)
            needed = not choice.is_all or expected != found
            names = _portable_names(model, fields, Path(folder)) if needed else {}
            if choice.is_all:
                check_fit(path, expected, found, remedy_for_misfits(expected, found, choice, names))
                taken, table = list(found), ""
                model.load_weights(file)
            else:
                selection = select(str(path), expected, found, choice, names)
                taken, table = list(selection.names), f"\n{selection.text}"
                _check_layers(path, own, file, taken)
                _copy_arrays(file, own, taken)
                model.load_weights(own)
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None
    numbers = sum(int(np.prod(found[name])) for name in taken)
    return f"{len(taken)} arrays, {numbers:,} numbers{table}"


def _portable_names(model: Model, fields: Sequence[Field], folder: Path) -> dict[str, list[str]]:
    """Return the portable names of the arrays in a model's file of weights.

    Keras alone knows where it keeps a variable in the file. So each variable is given its own number as its
    values, and a file with those is read. Variables whose type does not hold such numbers exactly have no
    portable name here.
    """
    fields = [field for field in fields if field.variable.dtype in _EXACT]
    before = [np.asarray(field.variable.numpy()) for field in fields]
    numbered = folder / "numbered.weights.h5"
    try:
        for number, (field, values) in enumerate(zip(fields, before, strict=True)):
            field.variable.assign(np.full_like(values, number))
        model.save_weights(numbered)
    finally:
        for field, values in zip(fields, before, strict=True):
            field.variable.assign(values)
    names: dict[str, list[str]] = {}
    with h5py.File(numbered) as file:
        for name in _shapes(numbered):
            values = np.asarray(file[name]).ravel()
            number = int(values[0]) if values.size and (values == values[0]).all() else -1
            if 0 <= number < len(fields) and values[0] == number and values.size == before[number].size:
                names[name] = [fields[number].name]
    return names


def _copy_arrays(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy arrays of one file of weights into another one, which has them in the same shapes."""
    with h5py.File(source) as found, h5py.File(target, "r+") as file:
        for name in names:
            file[name][...] = found[name][...]


def _check_layers(path: Path, own: Path, file: Path, names: Sequence[str]) -> None:
    """Check that a part of a file is not loaded into other layers than its own.

    Keras goes by kinds and order of layers. If a layer was added or removed, the order of the others changes.
    """
    model_layers, file_layers = _layer_names(own), _layer_names(file)
    for group in dict.fromkeys(name.rpartition("/")[0] for name in names):
        there, here = file_layers.get(group, ""), model_layers.get(group, "")
        kind = re.sub(r"_\d+$", "", group.removesuffix("/vars").rpartition("/")[2])
        is_numbered = re.fullmatch(rf"{re.escape(kind)}(_\d+)?", there) is not None
        if there != here and not is_numbered and there in model_layers.values():
            raise CheckpointError(
                f"{path}: its layer {there!r} is at the place of the model's layer {here!r}, as Keras counts "
                "layers of a kind, and the model has a layer of that name elsewhere",
                "Import all weights into the model that they were made by, and take a part of the checkpoint "
                "with --init-only or --init-skip: that goes by names.",
            )


def _layer_names(path: Path) -> dict[str, str]:
    """Return the names of the layers that a file's groups of variables belong to."""
    names: dict[str, str] = {}

    def visit(group: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and "name" in item.attrs:
            names[group] = str(item.attrs["name"])

    with h5py.File(path) as file:
        file.visititems(visit)
    return names


def _weights_in(path: Path, folder: Path) -> Path:
    """Return the .weights.h5 file that a file is or holds."""
    if path.suffix != ".keras":
        return path
    try:
        with zipfile.ZipFile(path) as archive:
            return Path(archive.extract(_WEIGHTS_FILE, folder))
    except Exception as error:  # several kinds, by how the archive is damaged or packed
        raise _damaged(path, error) from None


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
