"""What PyTorch's optimizers keep for each parameter, made before the first step makes it."""

import copy
from collections.abc import Collection

import torch

from hvdtrain.errors import TaskError


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
