"""Which portable arrays PyTorch's modules become, by module type: roles, layouts and gate orders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_STATISTIC_NORMS = *_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = (*_STATISTIC_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM_ROLES = {"weight": "gamma", "bias": "beta"}
_NORM_ROLES |= {"running_mean": "moving_mean", "running_var": "moving_variance"}


@dataclass(frozen=True)
class Layout:
    """How one portable array follows from tensors of a module, and they from it."""

    to_portable: Callable[[list[Array]], Array]  # from the tensors' values
    from_portable: Callable[[Array], list[Array]]  # to the tensors' values, in the same order
    of_slots: "Layout | None" = None  # the layout of optimizer slots, where it is another
    lossy: bool = False  # whether the array does not determine the tensors, so that they are saved as well


@dataclass(frozen=True)
class Rule:
    """One portable array of a module."""

    role: str  # its name below the module's path, such as "kernel" or "0/forward_layer/bias"
    tensors: tuple[str, ...]  # the module's names of the tensors that it follows from
    layout: Layout  # how
    rows: slice | None = None  # the part of each tensor's first axis that counts; all of it where None


def _one(to_portable: Callable[[Array], Array], from_portable: Callable[[Array], Array]) -> Layout:
    return Layout(lambda tensors: to_portable(tensors[0]), lambda array: [from_portable(array)])


SAME = _one(lambda a: a, lambda a: a)
_TRANSPOSED = _one(lambda a: a.T, lambda a: a.T)
# (out, in, ..spatial) to (..spatial, in, out); of a transposed convolution, whose own layout is
# (in, out, ..spatial), to (..spatial, out, in)
_CONVOLUTION = _one(lambda a: np.moveaxis(a, (1, 0), (-2, -1)), lambda a: np.moveaxis(a, (-2, -1), (1, 0)))


def rules(module: nn.Module) -> list[Rule]:
    """Return the portable arrays of a module of a known type."""
    for types, make in _RULES:
        if isinstance(module, types):
            return make(module)
    return []


def left_out(module: nn.Module) -> tuple[str, ...]:
    """Name the buffers of a module that are no part of its state."""
    # the count decides the average only where there is no fixed momentum
    counts = isinstance(module, _STATISTIC_NORMS) and module.momentum is not None
    return ("num_batches_tracked",) if counts else ()


def _kernel(module: Any) -> Layout:
    if module.transposed or module.groups != module.in_channels or module.in_channels == 1:
        return _CONVOLUTION
    channels = module.in_channels  # depthwise: (in * multiplier, 1, ..spatial) to (..spatial, in, multiplier)

    def to_portable(weight: Array) -> Array:
        return np.moveaxis(weight.reshape(channels, -1, *weight.shape[2:]), (0, 1), (-2, -1))

    def from_portable(kernel: Array) -> Array:
        weight = np.moveaxis(kernel, (-2, -1), (0, 1))
        return weight.reshape(-1, 1, *weight.shape[2:])

    return _one(to_portable, from_portable)


def _attention(module: nn.MultiheadAttention) -> list[Rule]:
    """(heads * width, in) to (in, heads, width) for what goes in, (heads, width, out) for what comes out."""
    embed, heads, width = module.embed_dim, module.num_heads, module.head_dim
    into = _one(lambda w: w.T.reshape(-1, heads, width), lambda k: k.reshape(-1, embed).T)
    per_head = _one(lambda b: b.reshape(heads, width), lambda b: b.reshape(-1))
    out = _one(lambda w: w.T.reshape(heads, width, -1), lambda k: k.reshape(embed, -1).T)
    found = []
    for i, name in enumerate(("query", "key", "value")):
        rows = slice(i * embed, (i + 1) * embed)
        if module.in_proj_weight is None:
            found.append(Rule(f"{name}/kernel", (f"{name[0]}_proj_weight",), into))
        else:
            found.append(Rule(f"{name}/kernel", ("in_proj_weight",), into, rows))
        found.append(Rule(f"{name}/bias", ("in_proj_bias",), per_head, rows))
    kernel = Rule("attention_output/kernel", ("out_proj.weight",), out)
    return [*found, kernel, Rule("attention_output/bias", ("out_proj.bias",), SAME)]


def _recurrent(module: nn.RNNBase) -> list[Rule]:
    directions = {"forward_layer/": "", "backward_layer/": "_reverse"} if module.bidirectional else {"": ""}
    found = []
    for layer in range(module.num_layers):
        place = f"{layer}/" if module.num_layers > 1 else ""
        for direction, suffix in directions.items():
            found += _gated(module.mode, place + direction, f"_l{layer}{suffix}")
    return found


def _gated(mode: str, place: str, suffix: str) -> list[Rule]:
    """Return the rules of one recurrent layer in one direction.

    PyTorch orders an LSTM's gates as Keras does (input, forget, cell, output); of a GRU, PyTorch has
    (reset, update, new) and Keras (update, reset, new). Keras's GRU keeps both biases, as two rows.
    """
    swap = _swap_gates if mode == "GRU" else (lambda array: array)
    kernel = _one(lambda w: swap(w).T, lambda k: swap(k.T))
    stacked = Layout(lambda biases: np.stack(list(map(swap, biases))), lambda bias: list(map(swap, bias[:2])))
    return [
        Rule(f"{place}kernel", (f"weight_ih{suffix}",), kernel),
        Rule(f"{place}recurrent_kernel", (f"weight_hh{suffix}",), kernel),
        Rule(f"{place}bias", (f"bias_ih{suffix}", f"bias_hh{suffix}"), stacked if mode == "GRU" else _SUMMED),
    ]


def _swap_gates(array: Array) -> Array:
    """Swap the first and second third of the first axis."""
    return np.concatenate([array.reshape(3, -1, *array.shape[1:])[i] for i in (1, 0, 2)])


# the two biases of an LSTM only ever act as their sum, and get equal gradients
_SUMMED = Layout(
    lambda biases: np.add(*biases),
    lambda bias: [bias, np.zeros_like(bias)],
    of_slots=Layout(lambda slots: slots[0], lambda slot: [slot, slot], lossy=True),
    lossy=True,
)


_RULES: list[tuple[tuple[type, ...], Callable[[Any], list[Rule]]]] = [
    ((nn.MultiheadAttention,), _attention),
    ((nn.RNNBase,), _recurrent),
    ((nn.RNNCellBase,), lambda cell: _gated("GRU" if isinstance(cell, nn.GRUCell) else "", "", "")),
    ((nn.Linear,), lambda module: [Rule("kernel", ("weight",), _TRANSPOSED)]),
    (_CONVOLUTIONS, lambda module: [Rule("kernel", ("weight",), _kernel(module))]),
    ((nn.Embedding, nn.EmbeddingBag), lambda module: [Rule("embeddings", ("weight",), SAME)]),
    (_NORMS, lambda module: [Rule(role, (name,), SAME) for name, role in _NORM_ROLES.items()]),
]
