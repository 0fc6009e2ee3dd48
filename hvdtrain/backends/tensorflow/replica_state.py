"""The variables of a Keras model that no optimizer updates; see also ``torch/replica_state.py``."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.replica_state import Changes, StateTensor, made_late
from hvdtrain.backends.tensorflow.reduction.broadcast import as_bytes
from hvdtrain.backends.tensorflow.state.model_state import ModelState, walk
from hvdtrain.backends.tensorflow.sync_batch_norm import find_batch_norms
from hvdtrain.backends.trained_set import TrainedSetBase


class TrainedSet(TrainedSetBase):
    """The trainable variables and layers, as they were last looked at."""

    def __init__(self, model: Any, tensors: ModelState) -> None:
        layers = {id(layer): (".".join(path) or model.name, layer) for path, layer in walk(model)}
        self._layers = list(layers.values())
        self._held = {id(layer) for layer in model._flatten_layers()}
        super().__init__(model, tensors, {field.name: field.variable for field in tensors.fields})

    def state(self, **chosen: Collection[int]) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps; None while all is as the model was built."""
        kept = super().state(**chosen)
        inferring = {name for name, _ in self._layers} - self._seen[1]
        return None if kept is None else {**kept, "frozen_layers": sorted(inferring)}

    def _look(self) -> tuple[set[str], set[str]]:
        trained = {id(v) for v in self._model.trainable_variables}
        names = {name for name, variable in self._named.items() if id(variable) in trained}
        # an RNN and its cell have one name, which is in no mode of training if one of them is frozen
        inferring = {name for name, layer in self._layers if not layer.trainable}
        return names, {name for name, _ in self._layers} - inferring

    def _set(self, state: Mapping[str, Collection[str]]) -> None:
        frozen, trained = set(state["frozen_layers"]), set(state["trained"])
        for name, layer in self._layers:
            layer._trainable = name not in frozen
        parameters = {id(v) for _, layer in self._layers for v in layer._trainable_variables}
        for name, variable in self._named.items():
            if id(variable) in parameters:
                variable.trainable = name in trained

    def _replaced(self) -> list[str]:
        layers = {id(layer): layer for layer in self._model._flatten_layers()}
        return sorted(layer.name for key, layer in layers.items() if key not in self._held and layer.weights)


_STATISTICS = ("moving_mean", "moving_variance")


class StateTensors:
    """A model's weights that are not trained."""

    def __init__(self, model: Any, tensors: ModelState) -> None:
        self._model = model
        norms = find_batch_norms(model).values()
        self._statistics = {id(getattr(norm, name, None)) for norm in norms for name in _STATISTICS}
        self._tensors = tensors

    def __call__(self) -> list[StateTensor]:
        """Return the variables that are not trained now."""
        return [
            _Variable(field.path, "mean" if id(field.variable) in self._statistics else "", field.variable)
            for field in self._tensors.fields
            if not field.trainable
        ]

    def take_back(self) -> None:
        """Do nothing: a forward pass assigns to variables, and replaces none."""

    def changes(self, kept: Sequence[tuple[Any, Any]]) -> Changes:
        """Return what calls of the model have changed since its variables were kept. Local."""
        found, values = Changes(), {id(variable): value for variable, value in kept}
        for field in self._tensors.fields:
            if not field.trainable and id(field.variable) not in self._statistics:
                data = as_bytes(field.variable)
                if not np.array_equal(data, as_bytes(values[id(field.variable)])):
                    found.crcs[field.name] = zlib.crc32(data.data)
        late = [variable.path for variable in self._model.weights if id(variable) not in values]
        found.refusal = made_late(late, "tf_model", "model(inputs, training=True)")
        return found


class _Variable(StateTensor):
    def read(self) -> NDArray[np.uint8]:
        return as_bytes(self.held)

    def write(self, data: NDArray[np.uint8]) -> None:
        value = self.held.numpy()
        self.held.assign(data.copy().view(value.dtype).reshape(value.shape))

    def numbers(self) -> NDArray[np.float64]:
        return np.array(self.held.numpy(), np.float64).reshape(-1)

    def assign(self, numbers: NDArray[np.float64]) -> None:
        value = self.held.numpy()
        self.held.assign(numbers.reshape(value.shape).astype(value.dtype))
