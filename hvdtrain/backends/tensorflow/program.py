"""Programs of Keras models: the call that training makes, recorded, and written with dynamic axes.

``torch/program.py`` does the same for PyTorch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.portable.program import Program, ProgramInput, make_program
from hvdtrain.backends.portable.program_check import Written, write_and_compare
from hvdtrain.backends.portable.recording import (
    Call,
    ModelCalledError,
    Recording,
    outputs_of,
    record_batches,
    record_serving,
)
from hvdtrain.backends.portable.trees import Tensors, leaves
from hvdtrain.backends.records import Exported
from hvdtrain.backends.tensorflow.functions import Phase
from hvdtrain.data.feed import HostBatch

Model = Any

_SERVE = "Give the task tf_serve(model, batch), which returns the outputs to serve."
_REMEDY = f"{_SERVE} Or export the whole model: --to keras."


def export_program(
    model: Model,
    objective: Objective,
    path: Path,
    batches: Sequence[HostBatch],
    serve: Callable[..., Any] | None,
) -> Exported:
    """Write the call of a model that its task makes as a program, load it back and compare outputs.

    Raises:
        TaskError: If the task does not make one call that a program can have.
    """
    called = Phase(model, training=False)
    served = called if serve is None else partial(serve, called)
    signature = inspect.signature(model.call if serve is None else served)
    recordings = record_batches(lambda batch: recorded(model, objective, batch_of(batch), serve), batches)
    program = make_program(recordings, served, signature, TENSORS, _REMEDY)
    return write_and_compare(program, served, TENSORS, partial(_write_program, program, model, served, path))


def recorded(
    model: Model,
    objective: Objective,
    tensors: Mapping[str, Any],
    serve: Callable[..., Any] | None = None,
    is_one_call: bool = False,
) -> Recording:
    """Return what the task's loss, or its function for serving, does with the model on one batch."""
    size = int(next(leaf for _, leaf in leaves(tensors, TENSORS.is_tensor)).shape[0])
    if serve is not None:
        return record_serving(serve, Phase(model, training=False), tensors, size)
    watched = _Watched(model, is_one_call)
    result = None
    with suppress(ModelCalledError):
        result = objective(watched, tensors)
    return Recording(tensors, size, watched.calls, watched.elsewhere, result)


def predicted(
    model: Model,
    objective: Objective,
    tensors: Mapping[str, Any],
    serve: Callable[..., Any] | None = None,
    is_one_call: bool = False,
) -> dict[str, Any]:
    """Return the outputs of the model, or of the task's function for serving, for one batch by name.

    Raises:
        TaskError: If the task's loss does not call the model once.
    """
    recording = recorded(model, objective, tensors, serve, is_one_call)
    signature = inspect.signature(model.call if serve is None else partial(serve, model))
    return outputs_of(recording, Phase(model, training=False), signature, TENSORS, _SERVE)


def batch_of(batch: HostBatch) -> dict[str, Any]:
    """Return a batch as the task's loss takes it."""
    return {name: tf.convert_to_tensor(array[0]) for name, array in batch.arrays.items()}


class _Watched(Phase):
    """A model in evaluation whose calls, and uses of its parts outside of these, are recorded."""

    def __init__(self, model: Model, is_one_call: bool) -> None:
        super().__init__(model, training=False)
        self._is_one_call = is_one_call
        self.calls: list[Call] = []
        self.elsewhere: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and record the call."""
        outputs = super().__call__(*args, **kwargs)
        self.calls.append(Call(args, kwargs, outputs))
        if self._is_one_call:
            raise ModelCalledError
        return outputs

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, keras.Layer) or inspect.ismethod(value):
            self.elsewhere.append(name)
        return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, keras.KerasTensor))


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


TENSORS = Tensors(_is_tensor, to_numpy, tf.concat)


def _write_program(
    program: Program,
    model: Model,
    served: Callable[..., Any],
    path: Path,
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
