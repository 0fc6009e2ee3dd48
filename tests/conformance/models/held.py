"""What a model may hold: numbers of every kind, laid out in any way, and more than tensors."""

import numpy as np
from conformance.zoo import RANDOM, SAMPLES, Judge, Model, Y

IMAGES = RANDOM.randn(SAMPLES, 3, 8, 8).astype(np.float32)
KINDS = (
    *("bool", "uint8", "int8", "int16", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn"),
)


class Held(Model):
    """A layer, and something else."""

    judge = Judge(("torch",), (1, 2))

    def hold(self, net):
        """Give the model what it holds besides its layer."""

    def run(self, net, x):
        """Return the model's outputs."""
        return net.head(x)

    def torch_model(self):
        import torch

        task = self

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(4, 3)
                task.hold(self)

            def forward(self, x):
                return task.run(self, x)

        return Net()


class EveryKind(Held):
    """A buffer of every kind: contiguous, transposed, expanded and without dimensions; none changes."""

    judge = Judge(("torch",))

    def hold(self, net):
        import torch

        for kind in KINDS:
            values = torch.arange(6).view(2, 3).to(getattr(torch, kind))
            views = {
                "plain": values,
                "turned": values.T,
                "wide": values[:, :1].expand(2, 4),
                "one": values[1, 1],
            }
            for name, view in views.items():
                net.register_buffer(f"{name}_{kind}", view)
        net.register_buffer("gaps", torch.arange(36.0).view(6, 6)[::2, ::3])
        net.register_buffer("none", torch.zeros(0, 4, dtype=torch.bool))
        net.register_buffer("passing", torch.ones(70_000, dtype=torch.bool), persistent=False)
        net.order = torch.nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)
        net.known = [(name, b.clone(), b.stride()) for name, b in net.named_buffers()]

    def run(self, net, x):
        import torch

        now = dict(net.named_buffers())
        for name, value, stride in net.known:
            assert now[name].dtype == value.dtype, name
            assert now[name].stride() == stride or 0 in stride, name
            bits, known = (one.contiguous().view(-1).view(torch.uint8) for one in (now[name], value))
            assert torch.equal(bits, known), name
        return net.head(x[:, net.order])


class SparseBuffers(Held):
    """A graph's adjacency as sparse buffers."""

    def hold(self, net):
        import torch

        adjacency = torch.eye(4) + torch.eye(4).roll(1, 0)
        net.register_buffer("rows", adjacency.to_sparse())
        net.register_buffer("compressed", adjacency.to_sparse_csr())

    def run(self, net, x):
        import torch

        return net.head(torch.sparse.mm(net.rows, (net.compressed @ x.T)).T)


class SparseParameter(Held):
    """A parameter that is a sparse tensor, which no optimizer here takes."""

    judge = Judge(("torch",), (1, 2), ("the model's weight is a tensor of torch.sparse_coo",))

    def hold(self, net):
        import torch

        net.weight = torch.nn.Parameter(torch.eye(4).to_sparse())


class AssignedBuffers(Held):
    """A buffer that the forward pass assigns anew, a transposed one of fp64."""

    def hold(self, net):
        import torch

        net.register_buffer("mean", torch.zeros(1, 4, dtype=torch.float64).T)

    def run(self, net, x):
        if net.training:
            net.mean = 0.9 * net.mean + 0.1
        return net.head(x + net.mean.T.float())


class ExtraState(Held):
    """A count in ``get_extra_state``, with a tensor of bf16."""

    def hold(self, net):
        import torch

        class Counting(torch.nn.Module):
            count = 0

            def get_extra_state(self):
                return {
                    "count": self.count,
                    "pair": (torch.full((2,), self.count, dtype=torch.bfloat16), None),
                }

            def set_extra_state(self, state):
                assert state["pair"][0].tolist() == [state["count"]] * 2
                self.count = state["count"]

        net.counting = Counting()

    def run(self, net, x):
        net.counting.count += net.training
        return net.head(x) * (1 + net.counting.count)


class UnsavedExtraState(Held):
    """An object in ``get_extra_state`` that only pickle could save."""

    judge = Judge(("torch",), (1, 2), ("get_extra_state() of Keeping cannot be saved",))

    def hold(self, net):
        import torch

        class Keeping(torch.nn.Module):
            def get_extra_state(self):
                return {"keep": object()}

            def set_extra_state(self, state):
                pass

        net.keeping = Keeping()


class InitialisedByData(Held):
    """A scale that the first batch sets, with a flag in Python, as ActNorm has it."""

    judge = Judge(("torch",), (1,))

    def hold(self, net):
        import torch

        net.scale = torch.nn.Parameter(torch.ones(4))
        net.register_buffer("is_set", torch.tensor(False))
        net.has_run = False

    def run(self, net, x):
        if not (net.has_run or net.is_set):
            net.scale.data.copy_(1 / x.abs().mean(0))
            net.has_run = True
            net.is_set.fill_(True)
        return net.head(x * net.scale)


class ComplexParameters(Held):
    """Complex weights, and a bias in bf16 next to fp32 ones."""

    judge = Judge(("torch",), rtol=2e-3)

    def hold(self, net):
        import torch

        net.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        net.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def run(self, net, x):
        return net.head((x.to(net.weight.dtype) @ net.weight).abs() + net.bias)


class ComplexSharded(ComplexParameters):
    """The same with an option that takes real numbers alone."""

    judge = Judge(
        ("torch",),
        (2,),
        ("parameter weight is complex64", "Leave the option out"),
        options=("--shard", "optimizer"),
    )


class BFloat16(Model):
    """A model in bf16, as ``from_pretrained`` gives language models."""

    judge = Judge(("torch",), rtol=2e-3)

    def torch_model(self):
        import torch

        class Net(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x.bfloat16()).float()

        return Net(4, 3).bfloat16()


class ChannelsLast(Model):
    """A convolution net in ``channels_last``, as PyTorch's tuning guide has it."""

    judge = Judge(("torch",), (1, 2))

    def data(self, rows):
        return IMAGES[rows], Y[rows]

    def torch_model(self):
        import torch
        from torch import nn

        class Net(nn.Sequential):
            def forward(self, x):
                assert self[0].weight.is_contiguous(memory_format=torch.channels_last)
                return super().forward(x)

        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        return Net(*layers).to(memory_format=torch.channels_last)


class Observers(Model):
    """Quantisation-aware training, whose observers resize their buffers in the first forward pass."""

    judge = Judge(("torch",), (1,))

    def eval_data(self):
        return None  # observers watch evaluations, too, batch by batch

    def torch_model(self):
        from torch import nn
        from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        model.qconfig = get_default_qat_qconfig("fbgemm")
        return prepare_qat(model.train())
