"""Which variables of a Keras model are trained; ``torch/trained_set.py`` does the same for PyTorch."""

from collections.abc import Collection
from typing import Any

from hvdtrain.backends.tensorflow.state.model_state import ModelState, walk
from hvdtrain.backends.trained_set import Change


class TrainedSet:
    """The trainable variables and layers, as they were last looked at.

    Args:
        model: the model.
        tensors: its variables.
    """

    def __init__(self, model: Any, tensors: ModelState) -> None:
        self._model, self._tensors = model, tensors
        layers = {id(layer): (".".join(path) or model.name, layer) for path, layer in walk(model)}
        self._layers = list(layers.values())
        self._held = {id(layer) for layer in model._flatten_layers()}
        self._trained, self._inferring = self._look()
        self._as_built = self._trained, self._inferring

    def change(self) -> Change:
        """Return the names of what has changed since ``accept`` was called last. Local: no collective."""
        trained, inferring = self._look()
        # a layer without trainable variables, as batch norm may be, has a mode of its own
        thawed = sorted(trained - self._trained) or sorted(self._inferring - inferring)
        frozen = sorted(self._trained - trained) or sorted(inferring - self._inferring)
        return thawed, frozen, self._replaced()

    def look(self) -> None:
        """Take the flags as they are: a step of the task's own may set them."""
        self._trained, self._inferring = self._look()

    def accept(self) -> None:
        """Take the variables that are trainable now as those that are trained."""
        self.look()
        self.optimize(())

    def optimize(self, others: Collection[int]) -> None:
        """Take some variables, by identity, as trained ones as well: those that an optimizer knows."""
        chosen = {id(v) for v in self._model.trainable_variables} | set(others)
        self._tensors.train(chosen)

    def state(self, **chosen: Collection[int]) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps; None while all is as the model was built.

        Args:
            chosen: identities of the variables that an optimizer knows.
        """
        if (self._trained, self._inferring) == self._as_built:
            return None
        known = {
            key: [field.name for field in self._tensors.fields if id(field.variable) in ids]
            for key, ids in chosen.items()
        }
        return {"trained": sorted(self._trained), "frozen_layers": sorted(self._inferring), **known}

    def follow(self, state: dict[str, list[str]]) -> None:
        """Take what a checkpoint keeps."""
        frozen, trained = set(state["frozen_layers"]), set(state["trained"])
        for name, layer in self._layers:
            layer._trainable = name not in frozen
        parameters = {id(v) for _, layer in self._layers for v in layer._trainable_variables}
        for field in self._tensors.fields:
            if id(field.variable) in parameters:
                field.variable.trainable = field.name in trained
        self.optimize(self.ids_of(state["optimized"]))

    def ids_of(self, names: Collection[str]) -> set[int]:
        """Return the identities of the variables of these names."""
        return {id(field.variable) for field in self._tensors.fields if field.name in set(names)}

    def _look(self) -> tuple[set[str], set[str]]:
        """Return the names of the trainable variables, and of the layers that are frozen."""
        trained = {id(v) for v in self._model.trainable_variables}
        names = {field.name for field in self._tensors.fields if id(field.variable) in trained}
        return names, {name for name, layer in self._layers if not layer.trainable}

    def _replaced(self) -> list[str]:
        layers = {id(layer): layer for layer in self._model._flatten_layers()}
        return sorted(layer.name for key, layer in layers.items() if key not in self._held and layer.weights)
