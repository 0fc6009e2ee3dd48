"""Keras layers that load and save their state themselves: what they have other than variables; loading it.

``Normalization`` computes with tensors that it makes of its variables when it loads them; a vocabulary or the
boundaries of bins are no variables at all. PyTorch's modules have nothing of the kind.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from numpy.typing import NDArray

from hvdtrain.backends.portable.names import OF_LAYERS
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import walk
from hvdtrain.errors import TaskError
from hvdtrain.workers.user_errors import where_raised

Layer = Any
Store = dict[str, NDArray[Any]]

_METHODS = ("save_own_variables", "load_own_variables", "save_assets", "load_assets", "finalize_state")
_FILE = "file:"  # before the name of a file that a layer writes
_VOCABULARY, _BOUNDARIES = "vocabulary", "bin_boundaries"


class LayerState:
    """The state of the layers of a model that load and save it themselves."""

    def __init__(self, model: Layer) -> None:
        found = {id(layer): ("/".join(path), layer) for path, layer in walk(model) if _is_own(layer)}
        self._layers: dict[str, Layer] = dict(found.values())
        self._known = {path: self._store(path) for path in self._layers}

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def paths(self) -> list[str]:
        """The paths of the layers."""
        return list(self._layers)

    def read(self) -> PortableState:
        """Return what the layers have other than variables, by private names."""
        return {
            f"{OF_LAYERS}{path}/{key}": array
            for path, layer in self._layers.items()
            for key, array in self._store(path).items()
            # but for its variables, which the model's state has
            if not any(np.array_equal(array, variable.numpy()) for variable in layer.weights)
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Let the layers load their variables, which have been assigned, and what else a state has."""
        is_changed = False
        for path, layer in self._layers.items():
            begin = f"{OF_LAYERS}{path}/"
            given = {name: array for name, array in state.items() if name.startswith(begin)}
            store = self._store(path) | {name.removeprefix(begin): given[name] for name in given}
            known = self._known[path]
            is_known = store.keys() == known.keys()
            if not is_known or not all(np.array_equal(store[key], known[key]) for key in store):
                try:
                    _load(layer, store)
                except Exception as error:
                    raise TaskError(
                        f"the layer {path} ({type(layer).__name__}) cannot load its state: "
                        f"{where_raised(error)}",
                        "Build it in tf_model() as for training.",
                    ) from error
                self._known[path], is_changed = store, True
        return is_changed

    def _store(self, path: str) -> Store:
        """Return all that a layer saves, as arrays."""
        layer, store = self._layers[path], dict[str, Any]()
        if isinstance(layer, IndexLookup):
            words = [str(w) if isinstance(w, str) else int(w) for w in layer.get_vocabulary()]
            store[_VOCABULARY] = np.frombuffer(json.dumps(words).encode(), np.uint8)
        elif isinstance(layer, keras.layers.Discretization):
            if layer.bin_boundaries is not None:
                store[_BOUNDARIES] = np.asarray(layer.bin_boundaries, np.float64)
            return store
        elif hasattr(layer, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                for file in sorted(one for one in Path(folder).rglob("*") if one.is_file()):
                    name = f"{_FILE}{file.relative_to(folder).as_posix()}"
                    store[name] = np.frombuffer(file.read_bytes(), np.uint8)
        if layer.built:
            layer.save_own_variables(store)
        arrays = {key: np.asarray(native(value)) for key, value in store.items()}
        if odd := [key for key, array in arrays.items() if array.dtype.kind not in "biufc"]:
            raise TaskError(
                f"the layer {path} ({type(layer).__name__}) saves {odd[0]!r} as {arrays[odd[0]].dtype}, for "
                "which a checkpoint has no place",
                "Save numbers in save_own_variables(), or a file in save_assets().",
            )
        return arrays


def _is_own(layer: Layer) -> bool:
    """Return whether a layer loads or saves its state in a way that is not Keras's for all layers."""
    kind = type(layer)
    if isinstance(layer, keras.layers.TextVectorization):
        return False  # the layer in it does
    if isinstance(layer, keras.layers.Normalization) and layer.input_mean is not None:
        return False
    modules = {getattr(kind, name).__module__ for name in _METHODS if hasattr(kind, name)}
    own = "keras.src.layers.preprocessing."
    return any(module.startswith(own) or not module.startswith("keras.") for module in modules)


def _load(layer: Layer, store: Store) -> None:
    """Let a layer load what it has saved."""
    kind = type(layer)
    if isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = store[_BOUNDARIES].tolist()
        return
    files = {key.removeprefix(_FILE): store[key] for key in store if key.startswith(_FILE)}
    rest = {key: array for key, array in store.items() if not key.startswith(_FILE)}
    if isinstance(layer, IndexLookup):
        words = json.loads(rest.pop(_VOCABULARY).tobytes())
        weights = {"idf_weights": rest["idf_weights"]} if "idf_weights" in rest else {}
        # the size was kept when the layer was first called; a vocabulary of the constructor is none any more
        layer._frozen_vocab_size = layer.input_vocabulary = None
        if len(words) > layer._token_start_index():
            layer.set_vocabulary(words, **weights)
        return
    if layer.built:
        layer.load_own_variables(rest)
    if files:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = (Path(folder) / name).resolve()
                if not path.is_relative_to(Path(folder).resolve()):
                    raise ValueError(f"{name} is outside of the folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.tobytes())
            layer.load_assets(folder)
    loads = kind.load_own_variables is not keras.Layer.load_own_variables or hasattr(kind, "load_assets")
    if hasattr(kind, "finalize_state") and not loads:
        layer.finalize_state()
