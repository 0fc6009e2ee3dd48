"""What PyTorch's optimizers keep for each parameter: made before the first step makes it, and kept."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdtrain.errors import TaskError
from hvdtrain.host.cores import is_out_of_memory


def fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Make the slots of hvdtrain's optimizers as zeros, so that there is a state to broadcast."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "betas" in group:
                optimizer.state[parameter] = {
                    # where the operation that computes with it runs
                    "step": torch.zeros((), device=parameter.device if group.get("fused") else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def make_slots(optimizer: torch.optim.Optimizer, chosen: Collection[int] | None = None) -> None:
    """Let an optimizer make its slots, by a step with zero gradients that changes nothing else.

    So the optimizer itself says which of them are tensors, and of which kind and device. Weight decay is left
    out: in some optimizers, it would be in the slots.

    Args:
        optimizer: the optimizer.
        chosen: identities of the parameters that get slots; None for those that require a gradient.

    Raises:
        TaskError: If the optimizer takes no such step.
    """
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p, p.detach().clone(), p.grad) for p in parameters]
    for p in parameters:
        is_chosen = p.requires_grad if chosen is None else id(p) in chosen
        p.grad = torch.zeros_like(p) if is_chosen else None
        if isinstance(optimizer, torch.optim.SparseAdam) and p.grad is not None:
            p.grad = p.grad.to_sparse()
    for group in optimizer.param_groups:
        if isinstance(group.get("weight_decay"), float | int):
            group["weight_decay"] = 0.0
    try:
        optimizer.step()
    except Exception as error:
        name = type(optimizer).__name__
        raise TaskError(f"the slots of {name} cannot be made: {error}") from error
    finally:
        for p, value, gradient in before:
            p.detach().copy_(value)
            p.grad = gradient
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)


def try_step(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], clip_norm: float | None
) -> None:
    """Let an optimizer that keeps nothing yet take a step with the gradients that are there.

    What it keeps is undone. The parameters are not: the caller has copies of them, or needs them no more.

    Args:
        optimizer: the optimizer.
        parameters: those that it trains, by path.
        clip_norm: largest norm of the gradients, or None.

    Raises:
        TaskError: If it fails, as one does that needs a closure or gradients of another kind.
    """
    inner = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    optimizers = [optimizer, *inner]
    options = [(g, {k: v for k, v in g.items() if k != "params"}) for o in optimizers for g in o.param_groups]
    copies = [(group, copy.deepcopy(values)) for group, values in options]
    attributes = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float | str | None)}
    try:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip_norm)
        optimizer.step()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        sparse = [name for name, p in parameters.items() if p.grad is not None and p.grad.is_sparse]
        text = str(error).partition("\n")[0].partition(". ")[0]
        raise TaskError(
            f"{type(optimizer).__name__} cannot take a step with the gradients of the first batch: {text}",
            _remedy(sparse, text),
        ) from error
    finally:
        for one in optimizers:
            one.state.clear()
        for group, values in copies:
            group.update(values)
        vars(optimizer).update(attributes)


@contextmanager
def optimizers_kept(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Return a context after which optimizers, and the options of their groups, are as they were.

    The copies lie in the host's memory.
    """
    states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    holders = [
        holder
        for optimizer, slots in states
        for holder in (*optimizer.param_groups, *slots.values())
        if isinstance(holder, dict)
    ]
    before = [
        (holder, {key: (value, _host_copy(value)) for key, value in holder.items() if key != "params"})
        for holder in holders
    ]
    try:
        yield
    finally:
        for optimizer, slots in states:
            optimizer.state.clear()
            optimizer.state.update(slots)
        for holder, values in before:
            for key in holder.keys() - values.keys() - {"params"}:
                del holder[key]
            for key, (value, copied) in values.items():
                is_tensor = isinstance(value, torch.Tensor)
                holder[key] = _written(value, copied) if is_tensor else copied


@torch.no_grad()
def _written(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(value)


def _host_copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _remedy(sparse: Sequence[str], text: str) -> str:
    if "closure" in text:
        return "step() is called without a closure: use an optimizer that needs none, such as SGD or AdamW."
    if sparse:
        return (
            f"The gradients of {', '.join(sparse)} are sparse, all others dense. Make the embeddings with "
            "sparse=False; or give those an optimizer of their own that takes sparse gradients, such as "
            "SparseAdam, in torch_optimizers(). hvdtrain's own optimizers take them, too."
        )
    return "Correct the optimizer, or give it parameters that it takes; --debug shows the traceback."
