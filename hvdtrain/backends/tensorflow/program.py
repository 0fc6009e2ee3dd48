"""Programs of Keras models: the call that a task serves, written with dynamic axes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.serving import Tensors
from hvdtrain.backends.portable.program import Program, ProgramInput, Written

Model = Any


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


TENSORS = Tensors(
    lambda value: isinstance(value, (tf.Tensor, keras.KerasTensor)),
    to_numpy,
    batch_of=lambda batch: {name: tf.convert_to_tensor(array[0]) for name, array in batch.arrays.items()},
    serve="tf_serve",
)


def write_program(model: Model, path: Path, program: Program, inputs: tuple[ProgramInput, ...]) -> Written:
    """Write the program with dynamic axes, and load it back."""
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = {one.name: _spec(one) for one in inputs}
    run: Callable[..., Any] = partial(_run, program)
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

    return Written(run_loaded, inputs)


def _run(program: Program, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return program.named(program(tensors), TENSORS)


def _spec(one: ProgramInput) -> Any:
    shape = [None if axis else size for axis, size in zip(one.axes, one.shape, strict=True)]
    return tf.TensorSpec(shape, one.dtype, one.name)
