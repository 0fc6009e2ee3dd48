"""The optimizer that a task brings or the config names; as in ``tensorflow/steps/optimizers.py``."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdtrain.backends.optimizers import (
    ParameterOptions,
    check_named_optimizers,
    check_own_optimizer,
    check_owners,
    check_positive,
    combined_rates,
    constructor_default,
    in_one_tensor,
    scheduled,
)
from hvdtrain.backends.options import LARS_EPSILON, LARS_TRUST, is_matrix
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.torch.state.model_state import Field, ModelState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Group = dict[str, Any]
Tensors = list[torch.Tensor]


class LARS(torch.optim.SGD):
    """LARS by the formula of docs/numbers.md (You, Gitman and Ginsburg 2017, arXiv:1708.03888)."""

    def __init__(self, params: Iterable[Any], momentum: float) -> None:
        super().__init__(params, lr=0.1, momentum=momentum, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Scale the gradients, in place, and take a step of sgd."""
        for group in self.param_groups:
            if group["adapts"]:
                self._scale_gradients(group)
        return super().step(closure)

    def _scale_gradients(self, group: Group) -> None:
        weights, gradients = _parts(group, {id(p): p.grad for p in group["params"]})
        l2 = group["decay"]
        if not weights:
            return
        w, g = _norms(weights), _norms(gradients)
        if l2:
            torch._foreach_add_(gradients, weights, alpha=l2)
        torch._foreach_mul_(gradients, _factors(w, g, LARS_TRUST * w / (g + l2 * w + LARS_EPSILON)))


class LAMB(torch.optim.Optimizer):
    """LAMB by the formula of docs/numbers.md (You et al. 2020, arXiv:1904.00962)."""

    def __init__(self, params: Iterable[Any], betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            updates = self._updates(group, tensors) if tensors else []
            if group["adapts"]:
                if updates and group["decay"]:
                    torch._foreach_add_(updates, tensors, alpha=group["decay"])
                of_tensors = dict(zip(map(id, tensors), updates, strict=True))
                weights, parts = _parts(group, of_tensors)
                if weights:
                    w, u = _norms(weights), _norms(parts)
                    torch._foreach_mul_(parts, _factors(w, u, w / u))
            if updates:
                torch._foreach_add_(tensors, updates, alpha=-group["lr"])

    def _updates(self, group: Group, tensors: Tensors) -> Tensors:
        """Move the moments, and return adam's updates without the learning rate."""
        states = [self.state[tensor] for tensor in tensors]
        for tensor, state in zip(tensors, states, strict=True):
            if not state:
                state["step"] = torch.zeros(())  # on the host, which computes with it
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
            state["step"] += 1
        beta1, beta2 = group["betas"]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        steps = [int(state["step"]) for state in states]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scales = list(torch._foreach_sqrt(second))
        torch._foreach_div_(scales, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_mul_(scales, [1 - beta1**step for step in steps])
        return list(torch._foreach_div(first, scales))


def _parts(group: Group, others: Mapping[int, torch.Tensor | None]) -> tuple[Tensors, Tensors]:
    """Return the parts of a group's weights that have norms of their own, and of what each weight has."""
    found = [
        (p[start:stop], other[start:stop])
        for p, parts in zip(group["params"], group["parts"], strict=False)
        if (other := others.get(id(p))) is not None
        for start, stop in parts
    ]
    return [weight for weight, _ in found], [other for _, other in found]


def _norms(tensors: Tensors) -> torch.Tensor:
    return torch.stack(list(torch._foreach_norm(tensors)))


def _factors(w: torch.Tensor, other: torch.Tensor, factors: torch.Tensor) -> Tensors:
    """Return the factor of each weight; 1 where either norm is 0."""
    return list(torch.where((w > 0) & (other > 0), factors, torch.ones_like(w)).unbind())


def choose_optimizer(
    task: Any, config: Config, model: ModelState, options: Mapping[str, ParameterOptions]
) -> torch.optim.Optimizer:
    """Make the optimizer of a job, for the model's trainable parameters."""
    parameters = [entry.tensor for entry in model.entries if entry.trainable]
    if hasattr(task, "torch_optimizer"):
        optimizer: torch.optim.Optimizer = task.torch_optimizer(parameters)
        check_own_optimizer(optimizer, torch.optim.Optimizer, "torch_optimizer", "an optimizer")
        return optimizer
    groups, betas = _groups(config, model, options), (config.adam_beta1, config.adam_beta2)
    fused = all(p.is_floating_point() for p in parameters)
    if config.optimizer == "lars":
        return LARS(groups, config.momentum)
    if config.optimizer == "lamb":
        return LAMB(groups, betas, config.adam_epsilon)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=fused)
    return torch.optim.SGD(groups, momentum=config.momentum, fused=fused)


def _groups(config: Config, model: ModelState, options: Mapping[str, ParameterOptions]) -> list[Group]:
    """Return groups of tensors with the same options; of lars and lamb, with the parts that have norms."""
    fields: dict[torch.Tensor, list[Field]] = {}
    # also those that a callback has frozen meanwhile, which keep their slots
    trained = {id(entry.tensor) for entry in model.entries if entry.trainable}
    for field in model.trainable_fields():
        for tensor in field.tensors:
            if id(tensor) in trained:
                fields.setdefault(tensor, []).append(field)
    adapts = config.optimizer in ("lars", "lamb")
    groups: dict[Any, Group] = {}

    def group_of(own: ParameterOptions, has_norms: bool) -> Group:
        adapted = {"parts": (), "adapts": has_norms, "decay": own.weight_decay}
        options = adapted if adapts else {"weight_decay": own.weight_decay}
        return groups.setdefault((has_norms, own), {"params": [], "lr_scale": own.factor, **options})

    for tensor, of_one in fields.items():
        names = [field.name for field in of_one]
        if len({options[name] for name in names}) > 1:
            raise in_one_tensor(names)
        matrices = [field for field in of_one if adapts and is_matrix(field.path, field.shape)]
        ranges = [(field.rows or slice(None)).indices(len(tensor))[:2] for field in matrices]
        group = group_of(options[names[0]], bool(ranges))
        group["params"].append(tensor)
        if ranges:
            group["parts"] += (tuple(ranges),)
    if not groups:  # of a stage without parameters
        group_of(ParameterOptions(1.0, 0.0), False)
    return list(groups.values())


def take_own_rates(optimizer: torch.optim.Optimizer) -> OwnRates:
    """Take the learning rates of a task's optimizer; a group's ``lr_scale`` is relative to the largest."""
    groups = optimizer.param_groups
    if any("initial_lr" in group for group in groups):  # every scheduler of PyTorch writes this
        raise scheduled("torch_optimizer", "torch.optim.lr_scheduler")
    rates = [None if group.get("lr") is None else float(group["lr"]) for group in groups]
    default = constructor_default(optimizer, "lr")
    is_default = all(rate is None or (default is not None and rate == float(default)) for rate in rates)
    given = [rate for rate in rates if rate is not None]
    base = max(given) if given else None
    if base is not None:
        check_positive(base, "torch_optimizer")
    factors = []
    for group, rate in zip(groups, rates, strict=True):
        own = 1.0 if rate is None or base is None else rate / base
        factors.append(own * float(group.get("lr_scale", 1.0)))
        if factors[-1] != 1.0 or "lr_scale" in group:
            group["lr_scale"] = factors[-1]
    return OwnRates(type(optimizer).__name__, base, is_default, tuple(factors))


def make_optimizers(
    task: Any, model: torch.nn.Module, tensors: ModelState
) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers of a task that names several."""
    method = "torch_optimizers"
    by_name = check_named_optimizers(task.torch_optimizers(model), torch.optim.Optimizer, method)
    known = {id(entry.tensor) for entry in tensors.entries}
    names = {id(entry.tensor): entry.path for entry in tensors.entries if entry.trainable}
    owned: dict[str, list[str]] = {}
    foreign: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, optimizer in by_name.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned[name] = [names[id(p)] for p in parameters if id(p) in names]
        foreign[name] = sum(id(p) not in known for p in parameters)
        owners |= dict.fromkeys(map(id, parameters), name)
    check_owners(method, list(names.values()), owned, foreign)
    for field in tensors.trainable_fields():
        if len({owners.get(id(tensor)) for tensor in field.tensors}) > 1:
            raise TaskError(
                f"parts of {field.name} belong to different optimizers; it is saved as one array",
                "Give all parameters of a module to the same optimizer.",
            )
    return by_name


def take_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> OwnRates:
    """Take the learning rates of a task's optimizers as their own; the largest of all is the base."""
    rates, relative = combined_rates({name: take_own_rates(one) for name, one in optimizers.items()})
    for name, optimizer in optimizers.items():
        if relative[name] != 1.0:
            for group in optimizer.param_groups:
                group["lr_scale"] = group.get("lr_scale", 1.0) * relative[name]
    return rates
