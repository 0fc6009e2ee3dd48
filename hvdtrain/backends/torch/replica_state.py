"""The tensors of a PyTorch model that no optimizer updates; ``tensorflow/replica_state.py`` has Keras's."""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _NormBase

from hvdtrain.backends.replica_state import Changes, StateTensor, made_late
from hvdtrain.backends.torch.reduction.broadcast import bytes_of
from hvdtrain.backends.torch.state.layouts import left_out
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.state.tensors import KeptTensor, address_of, set_values, strided_parts
from hvdtrain.backends.trained_set import TrainedSetBase
from hvdtrain.errors import TaskError


class TrainedSet(TrainedSetBase):
    """The parameters that require a gradient, and the modules that hold them, as they were last looked at."""

    prefix = "model/"

    def __init__(self, model: torch.nn.Module, tensors: ModelState) -> None:
        parameters = {e.path: e.tensor for e in tensors.entries if isinstance(e.tensor, torch.nn.Parameter)}
        self._places = [
            (path, held, dict(held))  # the mappings by which modules hold modules and parameters, and copies
            for path, module in model.named_modules()
            for held in (module._modules, cast(dict[str, Any], module._parameters))
            if held
        ]
        super().__init__(model, tensors, parameters)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Return a context without the change: modules hold and train what they did when last looked at."""
        trained, now = self._look()[0], [dict(held) for _, held, _ in self._places]
        self._put(self._seen[0], [before for *_, before in self._places])
        try:
            yield
        finally:
            self._put(trained, now)

    def _look(self) -> tuple[set[str], set[str]]:
        return {name for name, parameter in self._named.items() if parameter.requires_grad}, set()

    def _set(self, state: Mapping[str, Collection[str]]) -> None:
        for name, parameter in self._named.items():
            parameter.requires_grad_(name in state["trained"])

    def _put(self, trained: Collection[str], contents: Sequence[Mapping[str, Any]]) -> None:
        self._set({"trained": trained})
        for (_, held, _), content in zip(self._places, contents, strict=True):
            held.clear()
            held.update(content)

    def _replaced(self) -> list[str]:
        found = []
        for path, held, before in self._places:
            if len(held) == len(before) and all(map(is_, held.values(), before.values())):
                continue
            for name in before.keys() | held.keys():
                pair = held.get(name), before.get(name)
                if pair[0] is not pair[1] and any(map(_has_parameters, pair)):
                    found.append(f"{path}.{name}".lstrip("."))
        return sorted(found)


def _has_parameters(held: Any) -> bool:
    return isinstance(held, torch.Tensor) or (held is not None and any(True for _ in held.parameters()))


_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class _Place:
    """Where a module has a buffer or a parameter."""

    holder: dict[str, Any]  # the mapping that has it
    name: str  # its name there
    tensor: torch.Tensor  # what was there first, which is what is saved
    shape: torch.Size  # its shape then
    is_saved: bool  # whether it is a part of the saved state

    def replacement(self) -> torch.Tensor | None:
        """Return what a forward pass has put in the tensor's place, if it has."""
        now = self.holder.get(self.name)
        return now if isinstance(now, torch.Tensor) and now is not self.tensor else None


class StateTensors:
    """A model's buffers, persistent or not, and its frozen parameters."""

    def __init__(self, model: torch.nn.Module, tensors: ModelState) -> None:
        self._model, self._tensors = model, tensors
        self.paths = {id(entry.tensor): entry.path for entry in tensors.entries}
        saved = set(self.paths)
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]  # batch, instance
        self._defaults = {id(m._buffers.get(name)): "mean" for m in norms for name in _STATISTICS}
        self._places: list[_Place] = []
        for path, module in model.named_modules():
            parameters = cast(dict[str, Any], module._parameters)
            for holder in (parameters, module._buffers):
                for name, tensor in holder.items():
                    is_saved = id(tensor) in saved
                    if tensor is None or tensor.is_meta or (holder is parameters and not is_saved):
                        continue
                    self.paths.setdefault(id(tensor), "/".join(filter(None, (*path.split("."), name))))
                    self._places.append(_Place(holder, name, tensor, tensor.shape, is_saved))
                    if name in left_out(module):  # the count of a norm's batches
                        self._defaults[id(tensor)] = "max"

    def __call__(self) -> list[StateTensor]:
        """Return the tensors that are not trained now, each once."""
        self.take_back()
        # a buffer that is not saved, such as a cache, may have got another shape
        places = [place for place in self._untrained_places() if place.replacement() is None]
        there = [place.tensor for place in places if place.is_saved or place.tensor.shape == place.shape]
        each = {id(tensor): tensor for tensor in there}
        return [_Tensor(self.paths[key], self._defaults.get(key, ""), one) for key, one in each.items()]

    def changes(self, kept: Sequence[KeptTensor]) -> Changes:
        """Return what calls of the model have changed since its tensors were kept. Local."""
        found, values = Changes(), {id(tensor): value for *_, tensor, value in kept}
        for place in self._untrained_places():
            if id(place.tensor) in self._defaults:
                continue
            now, path = place.replacement(), self.paths[id(place.tensor)]
            value = values.get(id(place.tensor), place.tensor)
            if now is not None and _is_unlike(now, place.tensor):
                found.refusal = _unlike(path, now, place.tensor) if place.is_saved else None
                continue
            now = place.tensor if now is None else now
            is_written = address_of(now) != address_of(value)  # then its bytes may differ
            if is_written and not np.array_equal(as_bytes(now), as_bytes(value)):
                found.crcs[f"model/{path}"] = zlib.crc32(as_bytes(now).data)
        known = {(id(holder), name) for holder, name, *_ in kept}
        late = [
            f"{path}.{name}".lstrip(".")
            for path, module in self._model.named_modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
            if (id(holder), name) not in known
        ]
        found.refusal = made_late(late, "torch_model", "model(inputs)") or found.refusal
        return found

    def _untrained_places(self) -> list[_Place]:
        trained = {id(entry.tensor) for entry in self._tensors.entries if entry.trainable}
        return [place for place in self._places if id(place.tensor) not in trained]

    def take_back(self) -> TaskError | None:
        """Copy a buffer that a forward pass has replaced into the one that is saved, which is put back."""
        error = None
        for place in self._untrained_places():
            now, tensor = place.replacement(), place.tensor
            if now is None:
                continue
            if not _is_unlike(now, tensor):
                with torch.no_grad():
                    set_values(tensor, now)
                    place.holder[place.name] = tensor
            elif place.is_saved:
                error = error or _unlike(self.paths[id(tensor)], now, tensor)
        return error


class _Tensor(StateTensor):
    def read(self) -> NDArray[np.uint8]:
        return as_bytes(self.held)

    @torch.no_grad()
    def write(self, data: NDArray[np.uint8]) -> None:
        parts = [part for _, part in strided_parts(self.held)]
        values = torch.from_numpy(data.copy()).split_with_sizes([part.nbytes for part in parts])
        for part, value in zip(parts, values, strict=True):
            set_values(part, value.clone().view(part.dtype).view(part.shape))

    def numbers(self) -> NDArray[np.float64]:
        numbers: NDArray[np.float64] = self.held.detach().cpu().double().reshape(-1).clone().numpy()
        return numbers

    @torch.no_grad()
    def assign(self, numbers: NDArray[np.float64]) -> None:
        self.held.copy_(torch.from_numpy(numbers).reshape(self.held.shape))

    def stamp(self) -> object:
        """Return where a parameter lies and how often it was written to; None for a buffer."""
        is_known = isinstance(self.held, torch.nn.Parameter) and not self.held.is_inference()
        return (address_of(self.held), self.held._version) if is_known else None


def _is_unlike(now: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a tensor cannot be copied into another one without a change."""
    return now.shape != tensor.shape or now.dtype != tensor.dtype


def _unlike(path: str, now: torch.Tensor, tensor: torch.Tensor) -> TaskError:
    """Return the error for a buffer that is replaced by one of another shape or type."""
    was, is_ = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (tensor, now))
    return TaskError(
        f"a forward pass replaces the buffer {path}, {was}, by one that is {is_}: it cannot be saved",
        "Give the buffer its last shape and type in torch_model(), or register it with persistent=False.",
    )


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a tensor's values as bytes in the host's memory; those of one that lies there may share it."""
    parts = [bytes_of(part).cpu() for _, part in strided_parts(tensor)]
    data: NDArray[np.uint8] = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
    return data
