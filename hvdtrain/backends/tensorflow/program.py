"""Programs of Keras models: the call that training makes, recorded, and written with dynamic axes."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.portable.program import Program, ProgramInput, Written
from hvdtrain.backends.portable.recording import Call, ModelCalledError, ModelCalls, Tensors
from hvdtrain.backends.tensorflow.functions import Phase

Model = Any


class _Watched(Phase):
    """A model in evaluation whose calls, and uses of its parts outside of these, are recorded."""

    def __init__(self, model: Model, calls: list[Call], elsewhere: list[str], is_one_call: bool) -> None:
        super().__init__(model, training=False)
        self._is_one_call, self._calls, self._elsewhere = is_one_call, calls, elsewhere

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and record the call."""
        outputs = super().__call__(*args, **kwargs)
        self._calls.append(Call(args, kwargs, outputs))
        if self._is_one_call:
            raise ModelCalledError
        return outputs

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, keras.Layer) or inspect.ismethod(value):
            self._elsewhere.append(name)
        return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, keras.KerasTensor))


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


TENSORS = Tensors(_is_tensor, to_numpy)
CALLS = ModelCalls(
    TENSORS,
    "call",
    in_evaluation=partial(Phase, training=False),
    watched=lambda *watching: nullcontext(_Watched(*watching)),
    batch_of=lambda batch: {name: tf.convert_to_tensor(array[0]) for name, array in batch.arrays.items()},
    remedy="Give the task tf_serve(model, batch), which returns the outputs to serve.",
)


def write_program(
    model: Model,
    path: Path,
    program: Program,
    served: Callable[..., Any],
    inputs: tuple[ProgramInput, ...],
) -> Written:
    """Write the program with dynamic axes, and load it back."""
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = {one.name: _spec(one) for one in inputs}
    run: Callable[..., Any] = partial(_run, program, served)
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


def _run(program: Program, served: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    return program.named(program(served, tensors), TENSORS)


def _spec(one: ProgramInput) -> Any:
    shape = [None if axis else size for axis, size in zip(one.axes, one.shape, strict=True)]
    return tf.TensorSpec(shape, one.dtype, one.name)
