"""Looking into a model of PyTorch; ``tensorflow.py`` does the same for Keras."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from hvdtrain.backends.records import PortableState
from hvdtrain.backends.torch.objective.losses import NAMED
from hvdtrain.backends.torch.probes import as_array
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.task_model import make_model
from hvdtrain.tools.parity.observation import MOMENTUM, Array, CallRecorder
from hvdtrain.tools.parity.plain import PlainLoop, Samples


def _settings(module: Any) -> dict[str, float]:
    """Return what a layer was made with, under names that both frameworks share."""
    found = {}
    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and module.eps is not None:
        found["epsilon"] = float(module.eps)
    if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is not None:
        found[MOMENTUM] = 1.0 - module.momentum
    return found


def stop_dropout(model: nn.Module) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates, kinds = [], {"p": _DropoutNd, "dropout": nn.MultiheadAttention | nn.RNNBase}
    for module in model.modules():
        for name in [name for name, kind in kinds.items() if isinstance(module, kind)]:
            rates.append(float(getattr(module, name)))
            setattr(module, name, 0.0)
    return [rate for rate in rates if rate]


class Recorder(CallRecorder):
    """Keeps the calls of a model's modules, within its context."""

    def __enter__(self) -> "Recorder":
        self._inputs: list[Array | None] = []  # of the modules that run
        self._hooks: list[Any] = []
        for module in {id(m): m for m in self._model.modules()}.values():
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(next(all_arrays((args, kwargs)), None))  # now: the module may change it in place

    def _after(self, module: nn.Module, _args: Any, outputs: Any) -> None:
        self._keep(module, self._inputs.pop(), all_arrays(outputs), _settings(module))


def all_arrays(value: Any) -> Iterator[Array]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    if isinstance(value, Mapping):  # PyTorch's own walk has them as they were put in
        value = [value[name] for name in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        for one in value:
            yield from all_arrays(one)
        return
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield np.array(as_array(leaf))


@contextmanager
def in_fp64() -> Iterator[None]:
    """Return a context in which models are made that compute in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def paths_of(model: nn.Module) -> list[tuple[str, int]]:
    """Return the path and the identity of each module."""
    named = model.named_modules(remove_duplicate=False)
    return [(name.replace(".", "/"), id(module)) for name, module in named]


class Loop(PlainLoop):
    """A loop of PyTorch."""

    framework, table, total = "torch", NAMED, torch.sum

    @property
    def state(self) -> ModelState:
        """The model's state, whose tensors a call may replace."""
        return ModelState(self.model, self.renaming)

    def _open(self) -> None:
        self.model = make_model(self.task).to(self.backend.parts.computation.device)
        given = dict(self.backend.model.named_parameters())
        self.model.load_state_dict(self.backend.model.state_dict())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(given[name].requires_grad)
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        config, own = self.config, dict(self.model.named_parameters())
        if hasattr(self.task, "torch_optimizer"):
            trained = [parameter for parameter in own.values() if parameter.requires_grad]
            made: Any = self.task.torch_optimizer(trained)
        else:
            names = {id(parameter): name for name, parameter in self.backend.model.named_parameters()}
            groups = [
                {**{name: group[name] for name in ("weight_decay", "lr_scale")},
                 "params": [own[names[id(parameter)]] for parameter in group["params"]]}
                for group in self.backend.optimizers[0].param_groups
            ]  # fmt: skip
            if config.optimizer == "adamw":
                betas = config.adam_beta1, config.adam_beta2
                made = torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon)
            else:
                made = torch.optim.SGD(groups, lr=0.1, momentum=config.momentum)
        self.optimizer = made
        for group in made.param_groups:
            own_rate = float(group["lr"]) / float(self.own_base) if self.own_base else 1.0
            group["scale"] = own_rate * group.get("lr_scale", 1.0)

    def step(self, samples: Samples, number: int, rate: float) -> float:
        """Take a step."""
        self.backend.parts.computation.seed_step(number)  # the draws of one worker
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.zero_grad()
        loss = self._mean(*self._values(self.model, self._tensors(samples), True))
        loss.backward()
        variables = list(self.model.parameters())
        found = [variable.grad for variable in variables if variable.grad is not None]
        dense = [one for one in found if not one.is_sparse and one.is_floating_point()]
        if self.noise and dense:
            largest = max(float(one.abs().max()) for one in dense if one.numel())
            draw = torch.Generator().manual_seed(0)
            for one in dense:
                one.add_(torch.randn(one.shape, generator=draw).to(one) * self.noise * largest)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(variables, self.config.clip_norm)
        self.optimizer.step()
        return float(loss.detach())

    def restart(self, start: PortableState) -> None:
        """Begin anew, with another model and these arrays."""
        before = self.model
        self._open()
        for old, new in zip(before.modules(), self.model.modules(), strict=True):
            for name in ("p", "dropout"):  # of dropout layers that were stopped
                if isinstance(getattr(old, name, None), float):
                    setattr(new, name, getattr(old, name))
        super().restart(start)

    def losses(self, samples: Samples, training: bool) -> tuple[Any, Any]:
        """Return the losses of samples, or their mean, and the weights of samples."""
        self.model.train(training)
        with torch.enable_grad():  # which a model may need in evaluation, too
            values, weights = self._values(self.model, self._tensors(samples), training)
        return values.detach().double().cpu().numpy(), None if weights is None else weights.cpu().numpy()

    def seed(self, seed: int) -> None:
        """Seed PyTorch's generators."""
        torch.manual_seed(seed)

    def _like(self, weights: Any, values: Any) -> Any:
        return torch.as_tensor(weights, dtype=values.dtype, device=values.device)

    def _tensors(self, samples: Samples) -> dict[str, Any]:
        device = self.backend.parts.computation.device
        return {name: torch.from_numpy(np.array(array)).to(device) for name, array in samples.items()}

    def _named(self, name: str, outputs: Any, targets: Any) -> Any:
        if name == "cross_entropy":
            return F.cross_entropy(outputs, targets.long(), reduction="none")
        own = {"mse": F.mse_loss, "mae": F.l1_loss}.get(name, F.binary_cross_entropy_with_logits)
        found: Any = own(outputs, targets.to(outputs.dtype).reshape(outputs.shape), reduction="none")
        return found.flatten(1).mean(1) if found.dim() > 1 else found
