"""PyTorch models as portable state: every tensor found, named and laid out; snapshots of them."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import is_lazy

from hvdtrain.backends.optimizers import in_one_tensor
from hvdtrain.backends.portable.names import PRIVATE, Renaming, check_unique
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.torch.state.layouts import SAME, Layout, Rule, left_out, rules
from hvdtrain.backends.torch.state.tensors import PARTS, as_array, host_copy, set_values, strided_parts
from hvdtrain.errors import ExchangeError, TaskError
from hvdtrain.workers import wire

Array = NDArray[Any]

_PRIVATE = PRIVATE["torch"]
_TENSOR = "torch.Tensor"  # the key of a tensor in a module's extra state


@dataclass(frozen=True)
class Entry:
    """One tensor of a model."""

    # its portable name without "model/" or, where it is only a part of a portable array or several of them,
    # the module's path and its own name
    path: str
    tensor: torch.Tensor  # the parameter or buffer
    trainable: bool  # whether it is a parameter that training changes


@dataclass(frozen=True)
class Field:
    """One portable array, of a model or of an optimizer's slot."""

    path: str  # module path and role, such as "conv1/kernel"
    own: str  # the same without the task's ``state_names``
    tensors: tuple[torch.Tensor, ...]  # what it follows from
    tensor_paths: tuple[str, ...]  # the paths of their entries
    layout: Layout  # how it follows
    rows: slice | None = None  # the part of the tensors' first axis that counts; all where None
    torch_names: tuple[str, ...] = ()  # the tensors' names as the module has them, such as "conv1.weight"
    prefix: str = "model"  # "model", or "optimizer" and the slot
    resizes: bool = False  # whether the array may have another shape in a state, which the tensor then takes

    @property
    def name(self) -> str:
        """Its name in the portable state."""
        return f"{self.prefix}/{self.path}"

    @property
    def private_names(self) -> list[str]:
        """Names under which the tensors themselves are saved, where the array does not tell them."""
        lossy = self.layout.lossy
        return [f"{_PRIVATE}{self.prefix}/{path}" for path in self.tensor_paths] if lossy else []

    @property
    def shape(self) -> tuple[int, ...]:
        """The portable array's shape; no tensor is read."""
        zeros = [np.broadcast_to(np.float32(0), view.shape) for view in self.views(self.tensors)]
        return tuple(self.layout.to_portable(zeros).shape)

    def views(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Take the rows that count."""
        return [t.detach() if self.rows is None else t.detach()[self.rows] for t in tensors]

    def arrays(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[str, Array]]:
        """Lay out tensors, which are these or copies of them: (name, array), private ones as well."""
        values = [as_array(view) for view in self.views(tensors)]
        yield self.name, _contiguous(self.layout.to_portable(values))
        yield from zip(self.private_names, values, strict=False)

    def read(self) -> Array:
        """Copy the tensors into a portable array."""
        return np.array(next(self.arrays(self.tensors))[1])

    def write(self, state: StateArrays) -> None:
        """Copy the state's array of this name into the tensors."""
        values = self._own_values(state) or self.layout.from_portable(state[self.name])
        targets = self.tensors if self.resizes else self.views(self.tensors)
        for target, value in zip(targets, values, strict=True):
            set_values(target, torch.from_numpy(np.array(value, order="C")).to(target.dtype))

    def _own_values(self, state: StateArrays) -> list[Array] | None:
        """Return the tensors' values as saved, where the array still follows from them."""
        own = [state[name] for name in self.private_names if name in state]
        if not own or [one.shape for one in own] != [tuple(one.shape) for one in self.views(self.tensors)]:
            return None
        portable, array = self.layout.to_portable(own), state[self.name]
        # bit by bit but for subnormal numbers, which one thread takes for zeros and another does not
        tiny = np.finfo(np.float32).tiny
        same = portable.dtype == array.dtype and np.allclose(portable, array, 0, tiny, equal_nan=True)
        return own if same else None


def _contiguous(array: Array) -> Array:
    """Return an array in C order, itself if it is; PyTorch copies several times faster than numpy."""
    if array.flags.c_contiguous or min(array.strides, default=0) < 0:
        return np.require(array, requirements="C")
    turned = np.empty(array.shape, array.dtype)
    torch.from_numpy(turned).copy_(torch.from_numpy(array))
    return turned


class ModelState:
    """A model's tensors under their portable names, each once, in the model's order."""

    def __init__(self, model: nn.Module, renaming: Renaming) -> None:
        aliases: dict[Any, list[Field]] = {}
        for found in _fields(model):
            key = tuple(id(tensor) for tensor in found.tensors), str(found.rows)
            aliases.setdefault(key, []).append(found)
        renaming.check_used(field.own for fields in aliases.values() for field in fields)
        chosen = [min(fields, key=lambda field: renaming.rank(field.own)) for fields in aliases.values()]
        paths = [(one, tuple(map(renaming, one.tensor_paths))) for one in chosen]
        self.fields = [replace(one, path=renaming(one.own), tensor_paths=own) for one, own in paths]
        check_unique((field.path, " with ".join(field.torch_names)) for field in self.fields)
        entries: dict[int, Entry] = {}
        for field in self.fields:
            for t, path in zip(field.tensors, field.tensor_paths, strict=True):
                entries.setdefault(id(t), Entry(path, t, isinstance(t, nn.Parameter) and t.requires_grad))
        self.entries = list(entries.values())
        check_unique((entry.path, entry.path) for entry in self.entries)
        self._with_extra = {
            f"{_PRIVATE}model/{'/'.join((*path, 'extra_state'))}": module
            for path, module in _walk(model)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self.extra_states()  # so that a job begins with what can be saved

    def extra_states(self) -> PortableState:
        """Return what modules give in ``get_extra_state``, as bytes, by names that only PyTorch reads."""
        found: PortableState = {}
        for name, module in self._with_extra.items():
            try:
                found[name] = np.frombuffer(wire.encode(_sent(module.get_extra_state())), np.uint8)
            except ExchangeError as error:
                problem = f"get_extra_state() of {type(module).__name__} cannot be saved: {error.problem}"
                raise TaskError(problem, error.remedy) from None
        return found

    def load_extra_states(self, state: StateArrays) -> None:
        """Give modules what ``extra_states`` returned; others stay as they are."""
        for name, module in self._with_extra.items():
            if name in state:
                module.set_extra_state(_received(wire.decode(np.asarray(state[name]).tobytes(), "the state")))

    def part(self, chosen: Iterable[bool]) -> "ModelState":
        """Return some of the portable arrays and their tensors."""
        found = copy.copy(self)
        found.fields = [field for field, is_chosen in zip(self.fields, chosen, strict=True) if is_chosen]
        kept = {id(tensor) for field in found.fields for tensor in field.tensors}
        found.entries = [entry for entry in self.entries if id(entry.tensor) in kept]
        return found

    def trainable_fields(self) -> Iterator[Field]:
        """Return the portable arrays that training changes."""
        trainable = {id(entry.tensor) for entry in self.entries if entry.trainable}
        return (f for f in self.fields if any(id(t) in trainable for t in f.tensors))

    def freeze(self, names: Collection[str]) -> None:
        """Take the parameters of these portable names out of what training changes."""
        frozen = {id(t): field.name for field in self.fields if field.name in names for t in field.tensors}
        for field in self.fields:
            shared = [frozen[id(t)] for t in field.tensors if id(t) in frozen and field.name not in names]
            if shared:
                raise in_one_tensor([shared[0], field.name])
        for entry in self.entries:
            if id(entry.tensor) in frozen:
                entry.tensor.requires_grad_(False)
        self.train({id(entry.tensor) for entry in self.entries if entry.trainable} - frozen.keys())

    def train(self, chosen: Collection[int]) -> None:
        """Take the parameters of these identities as those that training changes, and no others."""
        self.entries = [replace(entry, trainable=id(entry.tensor) in chosen) for entry in self.entries]


def _walk(module: nn.Module, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """Return a module and all below it with their paths; shared ones once for each path."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            # torch.compile puts the module that it wraps below itself
            yield from _walk(child, path if name == "_orig_mod" else (*path, name))


def _fields(model: nn.Module) -> Iterator[Field]:
    taken: set[str] = set()
    for path, module in _walk(model):
        named: set[str] = set()
        for rule in rules(module):
            places = {_join(path, name) for name in rule.tensors}
            tensors = [_find(module, name) for name in rule.tensors]
            # a rule of the module above may have taken them, as attention's does of its projection
            if all(tensor is not None for tensor in tensors) and not places & taken:
                named |= places
                yield _field(path, rule, tensors)
        taken |= named
        # such as observers, which load buffers in a way of their own, and then resize them
        resizes = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        resizes = resizes and not isinstance(module, nn.modules.batchnorm._NormBase)
        for name, tensor in _own_tensors(module):
            if _join(path, name) not in taken:
                _check_kind(path, name, tensor)
                for part, values in strided_parts(tensor):
                    field = _field(path, Rule(name + part, (name + part,), SAME), [values])
                    yield replace(field, resizes=resizes and name in module._buffers)


def _field(path: tuple[str, ...], rule: Rule, tensors: list[Any]) -> Field:
    for name, tensor in zip(rule.tensors, tensors, strict=True):
        if is_lazy(tensor):
            problem = f"the model's {'.'.join((*path, name))} has no shape yet"
            raise TaskError(problem, "Call a model with lazy modules once in torch_model().")
    name = _join(path, rule.role)
    whole = len(tensors) == 1 and rule.rows is None
    paths = (name,) if whole else tuple(_join(path, tensor_name) for tensor_name in rule.tensors)
    torch_names = tuple(".".join((*path, tensor_name)) for tensor_name in rule.tensors)
    return Field(name, name, tuple(tensors), paths, rule.layout, rule.rows, torch_names)


def _check_kind(path: tuple[str, ...], name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has values that can be copied; and a parameter that is trained, dense ones."""
    is_ordinary = is_lazy(tensor) or (tensor.layout is torch.strided and not tensor.is_quantized)
    if not is_ordinary and (tensor.layout not in PARTS or tensor.requires_grad):
        raise TaskError(
            f"the model's {'.'.join((*path, name))} is a tensor of {tensor.layout}, {tensor.dtype}, which "
            "hvdtrain can neither save nor send to other workers",
            "Make it a dense tensor of ordinary numbers; a sparse one that is not trained can be a buffer.",
        )


def _sent(value: Any) -> Any:
    """Return a value of ``get_extra_state`` with lists and bytes in place of tensors, for ``wire``."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), numbers]}
    if isinstance(value, Mapping):
        return {key: _sent(one) for key, one in value.items()}
    return type(value)(map(_sent, value)) if type(value) in (list, tuple) else value


def _received(value: Any) -> Any:
    """Return what ``_sent`` was given."""
    if isinstance(value, dict) and list(value) == [_TENSOR]:
        kind, shape, numbers = value[_TENSOR]
        return torch.from_numpy(np.array(numbers)).view(getattr(torch, kind)).view(shape)
    if isinstance(value, dict):
        return {key: _received(one) for key, one in value.items()}
    return type(value)(map(_received, value)) if type(value) in (list, tuple) else value


def _join(path: tuple[str, ...], name: str) -> str:
    return "/".join((*path, *name.split(".")))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and persistent buffers of a module, without those of modules below."""
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set | set(left_out(module)):
            yield name, tensor


def _find(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, last = name.rpartition(".")
    try:
        return dict(_own_tensors(module.get_submodule(path))).get(last)
    except AttributeError:  # a part of the module was taken away
        return None


class TorchSnapshot:
    """A copy of tensors on its way to portable state."""

    def __init__(self, fields: Sequence[Field], numbers: PortableState) -> None:
        tensors = {id(tensor): tensor for field in fields for tensor in field.tensors}
        copies = {key: host_copy(tensor.detach()) for key, tensor in tensors.items()}
        self._numbers = numbers
        self._waiting = [
            (replace(one, tensors=()), [copies[id(t)] for t in one.tensors]) for one in reversed(fields)
        ]
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> PortableState:
        """Wait for the copies and lay them out; may be called once, in another thread."""
        if self._event is not None:
            self._event.synchronize()
        state: PortableState = {}
        while self._waiting:
            field, copies = self._waiting.pop()
            for name, array in field.arrays(copies):
                # pinned memory is given back: what the host may hold of it is limited
                state[name] = np.array(array) if self._event is not None else array
        return state | self._numbers
