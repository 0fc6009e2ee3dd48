"""Looking into a model of PyTorch; ``tensorflow.py`` does the same for Keras."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.modules import pooling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from hvdtrain.backends.custom_step import Optimizers
from hvdtrain.backends.objective.model_call import nested_batch
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.torch.objective.losses import NAMED
from hvdtrain.backends.torch.probes import as_array
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.task_model import make_model
from hvdtrain.tools.parity.findings import CLASS
from hvdtrain.tools.parity.observation import CallRecorder, LayerCall
from hvdtrain.tools.parity.plain import PlainLoop, Samples, StepOptimizer, weighted_mean

_OF_CHANNELS_FIRST = (
    *(_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm, nn.Dropout2d, nn.Dropout3d),
    *(pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._AdaptiveMaxPoolNd, pooling._AdaptiveAvgPoolNd),
    *(pooling._LPPoolNd, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)


def settings_of(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a module was made with.

    Args:
        module: the module.
        shape: the shape of its input; empty if that is no tensor.
    """
    found: dict[str, Any] = {}
    if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) and module.eps is not None:
        found["epsilon"] = float(module.eps)
    if isinstance(module, _BatchNorm) and module.track_running_stats:
        found["kept statistics"] = None if module.momentum is None else round(1 - module.momentum, 12)
    if isinstance(module, nn.GroupNorm):
        found["groups"] = module.num_groups
    if isinstance(module, (nn.Linear, _ConvNd)):
        found["bias"] = module.bias is not None
    if isinstance(module, _ConvNd) and not module.transposed:
        found |= {"strides": list(module.stride), "dilation": list(module.dilation), "groups": module.groups}
        found["padding"] = _padding(module)
    if isinstance(module, nn.GELU):
        found["gelu"] = "tanh" if module.approximate == "tanh" else "erf"
    if isinstance(module, nn.LeakyReLU):
        found["negative slope"] = float(module.negative_slope)
    if isinstance(module, _DropoutNd):
        found["rate"] = float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        found["heads"] = module.num_heads
    return found


def is_channels_first(module: nn.Module) -> bool:
    """Return whether a module takes and gives arrays whose second axis is that of channels.

    Of other modules, such as the user's, that is not known.
    """
    return isinstance(module, _OF_CHANNELS_FIRST)


def stop_dropout(model: nn.Module) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            rates.append(float(module.p))
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            rates.append(float(module.dropout))
            module.dropout = 0.0
    return [rate for rate in rates if rate]


def optimizer_settings(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer was made with."""
    group = optimizer.param_groups[0]
    found: dict[str, Any] = {CLASS: type(optimizer).__name__}
    names = {"momentum": "momentum", "eps": "epsilon", "nesterov": "nesterov", "dampening": "dampening"}
    for name, shared in names.items():
        if name in group:
            found[shared] = group[name]
    if "betas" in group:
        found["betas"] = [float(beta) for beta in group["betas"]]
    if "weight_decay" in group:  # groups without it are for biases and the like
        found["weight decay"] = max(float(one["weight_decay"]) for one in optimizer.param_groups)
    return found


def _padding(module: Any) -> list[list[int]]:
    """Return what a convolution adds before and after each spatial axis."""
    if module.padding == "valid":
        return [[0, 0] for _ in module.kernel_size]
    if module.padding == "same":  # PyTorch has it for strides of 1 alone
        sums = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [[total // 2, total - total // 2] for total in sums]
    return [[int(width), int(width)] for width in module.padding]


class Recorder(CallRecorder):
    """Keeps the calls of a model's modules, within its context."""

    def __init__(self, model: nn.Module, paths: Mapping[int, str]) -> None:
        super().__init__(model, paths)
        self._inputs: list[tuple[str, NDArray[Any] | None]] = []  # of the layers that run, with their paths
        self._hooks: list[Any] = []

    def __enter__(self) -> "Recorder":
        for module in {id(m): m for m in self._model.modules()}.values():
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self._paths.get(id(module), "")
        self._inputs.append((path, first_array((args, kwargs))))  # now: the module may change it in place

    def _after(self, module: nn.Module, _args: Any, outputs: Any) -> None:
        path, inputs = self._inputs.pop()
        if module is self._model and not self.outputs:
            self.outputs = tuple(all_arrays(outputs))
        self.calls.append(
            LayerCall(
                path,
                type(module).__name__,
                settings_of(module, () if inputs is None else inputs.shape),
                inputs,
                first_array(outputs),
                channels_first=is_channels_first(module),
            )
        )


def first_array(value: Any) -> NDArray[Any] | None:
    """Return a copy of the first tensor in a structure; None if there is none."""
    return next(all_arrays(value), None)


def all_arrays(value: Any) -> Iterator[NDArray[Any]]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    if isinstance(value, torch.Tensor):
        yield to_array(value)
    elif isinstance(value, Mapping):  # PyTorch's own walk has them as they were put in
        for name in sorted(value, key=str):
            yield from all_arrays(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from all_arrays(one)
    else:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield to_array(leaf)


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy of a tensor as an array; of half precision as fp32."""
    return np.array(as_array(tensor))


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

    framework = "torch"

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
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        config, own = self.config, dict(self.model.named_parameters())
        names = {id(parameter): name for name, parameter in self.backend.model.named_parameters()}
        if hasattr(self.task, "torch_optimizers"):
            self._optimizers: dict[str, Any] = dict(self.task.torch_optimizers(self.model))
        elif hasattr(self.task, "torch_optimizer"):
            trained = [parameter for parameter in own.values() if parameter.requires_grad]
            self._optimizers = {"optimizer": self.task.torch_optimizer(trained)}
        else:
            groups = [
                {
                    "params": [own[names[id(parameter)]] for parameter in group["params"]],
                    "weight_decay": group["weight_decay"],
                    "lr_scale": group["lr_scale"],
                }
                for group in self.backend.optimizers[0].param_groups
            ]
            betas = config.adam_beta1, config.adam_beta2
            is_adam = config.optimizer == "adamw"
            self._optimizers = {
                "optimizer": torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon)
                if is_adam
                else torch.optim.SGD(groups, lr=0.1, momentum=config.momentum)
            }
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                base = self.own_base or group["lr"]
                rate = float(group["lr"]) / float(base) if self.own_base else 1.0
                group["scale"] = rate * group.get("lr_scale", 1.0)

    def step(self, samples: Samples, number: int, rate: float) -> float:
        """Take a step with a batch; return its loss."""
        self.backend.parts.computation.seed_step(number)  # the draws of one worker
        self.model.train()
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
        batch = self._tensors(samples)
        if self._step is not None:
            given = {name: self._given(one) for name, one in self._optimizers.items()}
            optimizers = Optimizers(given)
            optimizers.step = number
            losses = self._step(self.model, nested_batch(batch), optimizers)[0]
            values, weights = self._pair(losses)
            return float(weighted_mean(values, weights, torch.sum).detach())
        (optimizer,) = self._optimizers.values()
        optimizer.zero_grad()
        loss = weighted_mean(*self._values(self.model, batch, True), torch.sum)
        loss.backward()
        self._shake([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        optimizer.step()
        return float(loss.detach())

    def _shake(self, gradients: list[Any]) -> None:
        dense = [one for one in gradients if not one.is_sparse and one.is_floating_point()]
        if self.noise and dense:
            largest = max(float(one.abs().max()) for one in dense if one.numel())
            draw = torch.Generator().manual_seed(0)
            for one in dense:
                one.add_(torch.randn(one.shape, generator=draw).to(one) * self.noise * largest)

    def restart(self, start: PortableState) -> None:
        """Begin anew, with another model and these arrays."""
        before = self.model
        self._open()
        for old, new in zip(before.modules(), self.model.modules(), strict=True):
            for name in ("p", "dropout"):  # of dropout layers that were stopped
                if isinstance(getattr(old, name, None), float):
                    setattr(new, name, getattr(old, name))
        super().restart(start)

    def settings(self) -> dict[str, Any]:
        """Return what the optimizer was made with."""
        return optimizer_settings(next(iter(self._optimizers.values())))

    def _given(self, optimizer: Any) -> Any:
        variables = [p for group in optimizer.param_groups for p in group["params"]]

        def gradients(losses: Any, retain_graph: bool = False) -> Any:
            values, weights = self._pair(losses)
            mean = weighted_mean(values, weights, torch.sum)
            found = torch.autograd.grad(mean, variables, retain_graph=retain_graph, allow_unused=True)
            return [torch.zeros_like(v) if g is None else g for g, v in zip(found, variables, strict=True)]

        def apply(found: Any) -> None:
            for variable, gradient in zip(variables, found, strict=True):
                variable.grad = gradient.detach().clone()
            self._shake([variable.grad for variable in variables])
            if self.config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(variables, self.config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return StepOptimizer(gradients, apply, variables)

    def losses(self, samples: Samples, training: bool) -> tuple[Any, Any]:
        """Return the losses of samples, or their mean, and the weights of samples."""
        self.model.train(training)
        with torch.enable_grad():  # which a model may need in evaluation, too
            values, weights = self._values(self.model, self._tensors(samples), training)
        return values.detach().double().cpu().numpy(), None if weights is None else weights.cpu().numpy()

    def seed(self, generator: str, seed: int) -> None:
        """Seed PyTorch's generators."""
        torch.manual_seed(seed)

    def _like(self, weights: Any, values: Any) -> Any:
        return torch.as_tensor(weights, dtype=values.dtype, device=values.device)

    def _tensors(self, samples: Samples) -> dict[str, Any]:
        device = self.backend.parts.computation.device
        return {name: torch.from_numpy(np.array(array)).to(device) for name, array in samples.items()}

    def _table(self) -> Mapping[str, Any]:
        return NAMED

    def _named(self, name: str, outputs: Any, targets: Any) -> Any:
        if name == "cross_entropy":
            return F.cross_entropy(outputs, targets.long(), reduction="none")
        functions: dict[str, Any] = {
            "mse": F.mse_loss,
            "mae": F.l1_loss,
            "binary_cross_entropy": F.binary_cross_entropy_with_logits,
        }
        found = functions[name](outputs, targets.to(outputs.dtype).reshape(outputs.shape), reduction="none")
        return found.flatten(1).mean(1) if found.dim() > 1 else found
