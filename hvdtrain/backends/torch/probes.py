"""What looks at a model without training it; ``tensorflow/probes.py`` does the same for Keras."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.gathering import GivenArrays
from hvdtrain.backends.objective.gathering import find_comparing as find_comparing_values
from hvdtrain.backends.objective.losses import sample_values
from hvdtrain.backends.records import DryRun
from hvdtrain.backends.replica_state import Changes
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.objective.losses import as_arrays
from hvdtrain.backends.torch.state.tensors import KeptTensor, address_of, as_kept, set_values
from hvdtrain.backends.torch.sync_batch_norm import find_batch_norms
from hvdtrain.backends.torch.task_model import LOSS
from hvdtrain.backends.workers import peer_errors
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError
from hvdtrain.storage.text import some

_NAMED = 3  # of modules, at most
_ACTIVATIONS = {nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.Sigmoid: "sigmoid"}


@contextmanager
def _recorded(model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Return a context in which what calls of a model return is kept, as arrays."""
    # not compiled: a hook would compile it anew
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    hook = model.register_forward_hook(
        lambda _model, _inputs, found: outputs.insert(0, pytree.tree_map_only(torch.Tensor, as_array, found))
    )
    try:
        yield
    finally:
        hook.remove()
        model._compiled_call_impl = compiled


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array; of half precision as fp32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


@contextmanager
def state_kept(
    model: nn.Module, device: torch.device, others: Iterable[torch.Tensor] = ()
) -> Iterator[list[KeptTensor]]:
    """Return a context after which a model, its attributes and PyTorch's generators are as they were."""
    more = [(tensor, as_kept(tensor)) for tensor in others]
    places: list[KeptTensor] = [
        (tensors, name, tensor, as_kept(tensor, tensors is module._buffers))
        for module in model.modules()
        for tensors in (cast(dict[str, Any], module._parameters), module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    mode, attributes = model.training, [(vars(module), dict(vars(module))) for module in model.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield places
        finally:
            if model.training is not mode:
                (model.train if mode else model.eval)()
            for tensors, name, tensor, _ in places:
                tensors[name] = tensor
            for tensor, value in [*more, *(place[2:] for place in places)]:
                if address_of(tensor) != address_of(value):
                    set_values(tensor, value)
            for now, before in attributes:
                now.clear()
                now.update(before)


def parts_in_evaluation(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules in evaluation mode, by name, of a model that is in training mode."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if model.training else ():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def describe_undone(before: Mapping[str, nn.Module]) -> str:
    """Return a note of modules that ``train()`` has put into training mode; empty if there are none."""
    undone = [f"{name} ({type(module).__name__})" for name, module in before.items() if module.training]
    if not undone:
        return ""
    return (
        f"train() is called before the first step, as in every trainer, and puts {some(undone, _NAMED)} into "
        "training mode; torch_model() had put that into evaluation mode. To keep it there, override train() "
        "of the model"
    )


def last_activation(model: nn.Module) -> str:
    """Return "softmax" or "sigmoid" if that is the module that a model registered last; else nothing."""
    last = [module for name, module in model.named_modules() if name.partition(".")[0] != LOSS][-1]
    return _ACTIVATIONS.get(type(last), "")


def count_frozen(model: nn.Module) -> int:
    """Return the number of parameters that training does not change."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def dry_run(step: Any, state_tensors: Any, batch: HostBatch, training: bool) -> DryRun:
    """Collective. Compute the first micro-batch without changing state."""
    computation: Computation = step.computation
    model = computation.model
    outputs: list[Any] = []
    values, error, changes = {}, None, Changes()
    in_evaluation, undone = parts_in_evaluation(model), ""
    changed: tuple[str, ...] = ()
    try:
        with peer_errors(), state_kept(model, computation.device) as kept:
            # copies, which the model may change: the tensors of the CPU lie in the arrays' memory
            copies = {name: array.copy() for name, array in batch.arrays.items()}
            wrapped = computation.wrap(replace(batch, arrays=copies))
            with _recorded(model, outputs):
                values = step.dry_run(wrapped, training)
            changes = state_tensors.changes(kept)
            undone = describe_undone(in_evaluation) if training else ""
            changed = tuple(
                name
                for name, tensor in wrapped.micro_batches[0].items()
                if not np.array_equal(
                    tensor.detach().cpu(), batch.arrays[name][0], tensor.is_floating_point()
                )
            )
    except PeerLostError:
        raise
    except Exception as raised:
        error = raised
    computation.forget_mode()  # the modes are as before, so that training begins with a call of train()
    metrics = {} if training else computation.evaluation.tried
    found = changes.crcs, changes.refusal, changed, computation.weighted, metrics
    outputs.append(None)  # if the model was not called
    result = DryRun(outputs[0], values, last_activation(model), error, undone, *found)
    return step.completed(result, training)


def values_of_first(
    computation: Computation, batch: TorchBatch, training: bool, rows_of: Callable[..., torch.Tensor]
) -> dict[str, NDArray[Any]]:
    """Return the loss and the metrics of a batch's first micro-batch, by name."""
    computation.enter_mode(training)
    micro_batch, weights, gradient_weights = next(computation.micro_batches(batch))
    computation.batch_norm.weights = weights
    computation.gathering.is_used = False
    computation.names = ()  # so that shapes are checked
    computation.seed_step(batch.step)
    if training:
        rows = rows_of(micro_batch, weights, gradient_weights)
    else:
        with torch.no_grad():
            rows = computation.per_sample(micro_batch, weights).rows
            evaluation = computation.evaluation
            evaluation.try_out(evaluation.take(), batch.samples.rows(0, len(weights)))
    return sample_values(computation.names, computation.weighted, rows.cpu().numpy(), weights.cpu().numpy())


def find_comparing(computation: Computation, batch: HostBatch, training: bool) -> str:
    """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
    model, device = computation.model, computation.device
    # whether a layer has the statistics of the batch in evaluation, too
    is_unusual = any(layer.running_mean is None for layer in find_batch_norms(model).values())
    if computation.gathering.is_used or is_unusual:
        return ""
    with peer_errors(), state_kept(model, device):
        computation.enter_mode(training)
        micro_batch, weights, _ = next(computation.micro_batches(computation.wrap(batch)))
        for module in list(model.modules())[1:]:
            module.training = False

        def values_of(rows: NDArray[np.int64], seed: int) -> GivenArrays:
            chosen = torch.from_numpy(rows).to(device)
            parts = {name: tensor[chosen] for name, tensor in micro_batch.items()}
            with state_kept(model, device), torch.set_grad_enabled(training):
                computation.seed_step(seed)
                given = computation.given(parts, weights[chosen])
            return {name: as_arrays(value) for name, value in given.items()}

        tolerance = 1e-4 if computation.precision == "fp32" else 3e-2
        found = find_comparing_values(values_of, len(weights), tolerance)
    computation.forget_mode()
    return found
