"""Keras models in formats for serving, and weights files of Keras.

``torch/export.py`` does the same for PyTorch.
"""

import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective import Objective
from hvdtrain.backends.portable.files import Exported, check_fit, compare
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError

Model = Any
Outputs = list[NDArray[Any]]

_WEIGHTS_FILE = "model.weights.h5"  # in a .keras file, which is a zip archive


def export_model(
    model: Model, objective: Objective, format_name: str, path: Path, batch: HostBatch
) -> Exported:
    """Write a model, load it back and compare outputs.

    Args:
        model: the model, with its weights.
        objective: the task's, to compare by where only it knows how to call the model.
        format_name: "keras" or "saved-model".
        path: the file or directory.
        batch: real samples.

    Raises:
        TaskError: If the model cannot be written in this format.
    """
    sample = {name: tf.convert_to_tensor(array[0]) for name, array in batch.arrays.items()}
    if format_name == "keras":
        model.save(path)
        loaded = _load_back(path)
        return compare(_outputs(model, sample, objective), _outputs(loaded, sample, objective))
    if "inputs" not in sample:
        raise TaskError(
            f"a serving signature takes batch['inputs'] alone; this task's samples have {sorted(sample)}",
            "Export the model with --to keras.",
        )
    return _export_saved_model(model, path, sample["inputs"])


def _load_back(path: Path) -> Model:
    try:
        return keras.models.load_model(path, compile=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"what was written cannot be loaded back: {str(error).partition(chr(10))[0][:300]}",
            "Register classes of your own with @keras.saving.register_keras_serializable(), or use "
            "--to saved-model.",
        ) from None


def _outputs(model: Model, sample: dict[str, Any], objective: Objective) -> Outputs:
    called = partial(model, training=False)
    if "inputs" in sample:
        try:
            return _flat(called(sample["inputs"]))
        except Exception:
            pass
    losses, metrics = objective(called, sample)
    return _flat((losses, *metrics.values()))


def _flat(outputs: Any) -> Outputs:
    return [np.asarray(keras.ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(outputs)]


def _export_saved_model(model: Model, path: Path, inputs: Any) -> Exported:
    """Export with a dynamic batch dimension where the model allows it, else with this batch's size."""
    try:
        run = _write_saved_model(
            model, path, tf.TensorSpec((None, *inputs.shape[1:]), inputs.dtype, "inputs")
        )
        whole, first = (
            compare(_flat(model(part, training=False)), run(part), "any batch size")
            for part in (inputs, inputs[:1])
        )
        return whole.joined(first)
    except Exception as error:
        problem = error
    try:
        run = _write_saved_model(model, path, tf.TensorSpec(inputs.shape, inputs.dtype, "inputs"))
    except Exception as error:
        raise error from problem
    return compare(_flat(model(inputs, training=False)), run(inputs), f"batches of {len(inputs)} only")


def _write_saved_model(model: Model, path: Path, signature: Any) -> Callable[[Any], Outputs]:
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", partial(model, training=False), input_signature=[signature])
    archive.write_out(path, verbose=False)
    loaded = tf.saved_model.load(path)

    def run(part: Any) -> Outputs:
        # the signature alone would not keep its variables alive
        found = loaded.signatures["serving_default"](inputs=part)
        return [found[name].numpy() for name in sorted(found, key=_place)]

    return run


def _place(name: str) -> tuple[int, str]:
    """Return an output's place by its name: output_0, output_1, ...; keys of a mapping by the alphabet."""
    number = name.removeprefix("output_")
    return int(number) if number.isdecimal() else 0, name


def load_weights_file(model: Model, path: Path) -> str:
    """Load a file of weights into a model; say what was understood.

    Of a .keras file the weights are read, and nothing that says how to build a model.

    Raises:
        CheckpointError: If it is damaged, of an older Keras, or does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.weights.h5"
        model.save_weights(own)
        file = _weights_in(path, Path(folder))
        try:
            expected, found = _shapes(own), _shapes(file)
            check_fit(path, expected, found)
            model.load_weights(file)
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise _damaged(path, error) from None
    numbers = sum(int(np.prod(shape)) for shape in found.values())
    return f"{len(found)} arrays, {numbers:,} numbers"


def _weights_in(path: Path, folder: Path) -> Path:
    """Return the .weights.h5 file that a file is or holds."""
    if path.suffix != ".keras":
        return path
    inside = folder / "file.weights.h5"
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_WEIGHTS_FILE) as source:
            inside.write_bytes(source.read())
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
