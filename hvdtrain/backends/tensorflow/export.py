"""Keras models in formats for serving, also as programs with dynamic axes, and weights files of Keras."""

import math
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.model_call import Serving, Tensors
from hvdtrain.backends.portable import program as programs
from hvdtrain.backends.portable.names import check_fit
from hvdtrain.backends.records import Exported
from hvdtrain.backends.tensorflow.functions import Phase
from hvdtrain.backends.tensorflow.objective.losses import to_numpy
from hvdtrain.backends.tensorflow.task_model import without_loss
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError

Model = Any

_WEIGHTS_FILE = "model.weights.h5"  # in a .keras file, which is a zip archive

TENSORS = Tensors(
    lambda value: isinstance(value, (tf.Tensor, keras.KerasTensor)),
    to_numpy,
    batch_of=lambda batch: {name: tf.convert_to_tensor(array[0]) for name, array in batch.arrays.items()},
    serve="tf_serve",
)


def export_model(
    model: Model, serving: Serving, format_name: str, path: Path, batches: Sequence[HostBatch]
) -> Exported:
    """Write a model as "keras" or "saved-model", load it back and compare outputs."""
    if format_name == "keras":
        model.save(path)
        try:
            loaded = keras.models.load_model(path, compile=False)
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"what was written cannot be loaded back: {str(error).partition(chr(10))[0][:300]}",
                "Register classes of your own with @keras.saving.register_keras_serializable(), or use "
                "--to saved-model.",
            ) from None
        pair = (Phase(one, training=False) for one in (model, loaded))
        return programs.compare(*(serving.arrays(one, batches[0], TENSORS) for one in pair))

    def served(batch: Mapping[str, Any]) -> Any:
        return serving.outputs(Phase(model, training=False), batch)

    program = programs.make_program(served, batches, TENSORS, serving.is_model_call)
    return programs.write_and_compare(program, partial(_write_program, model, path))


def _write_program(
    model: Model, path: Path, program: programs.Program, inputs: tuple[programs.ProgramInput, ...]
) -> programs.Written:
    """Write the program with dynamic axes, and load it back."""

    def run(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return program.named(program(tensors))

    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = {one.name: tf.TensorSpec(one.sizes(), one.dtype, one.name) for one in inputs}
    if len(inputs) == 1:
        (name,) = signature
        archive.add_endpoint("serve", lambda tensor: run({name: tensor}), input_signature=[signature[name]])
    else:
        archive.add_endpoint("serve", run, input_signature=[signature])
    archive.write_out(path, verbose=False)
    loaded = tf.saved_model.load(path)

    def run_loaded(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        # the signature alone would not keep its variables alive
        found = loaded.signatures["serving_default"](**tensors)
        return {name: found[name].numpy() for name in program.output_names}

    return programs.Written(run_loaded, inputs)


def load_weights_file(model: Model, path: Path) -> str:
    """Load a file of weights into a model; say what was understood. Of a .keras file the weights are read."""
    with tempfile.TemporaryDirectory() as folder, without_loss(model):
        own = Path(folder) / "own.weights.h5"
        model.save_weights(own)
        try:
            file = path
            if path.suffix == ".keras":
                with zipfile.ZipFile(path) as archive:
                    file = Path(archive.extract(_WEIGHTS_FILE, folder))
            found = _shapes(file)
            check_fit(path, _shapes(own), found)
            model.load_weights(file)
        except CheckpointError:
            raise
        except Exception as error:  # several kinds, by how the file is damaged or packed
            message = str(error).strip("'\"").partition("\n")[0]
            raise CheckpointError(f"{path} is damaged or no file of weights: {message}") from None
    return f"{len(found)} arrays, {sum(map(math.prod, found.values())):,} numbers"


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
