"""Parameters that are shared, made late, computed of others, or that do not always get a gradient."""

from collections.abc import Mapping

from conformance.zoo import DECAYED, GRADIENT_DESCENT, Judge, Model, module


class TiedWeights(Model):
    """The decoder is the encoder's weight, transposed; both are one parameter."""

    def torch_model(self):
        from torch import nn

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
                self.decoder.weight = self.encoder.weight
                self.head = nn.Linear(4, 3)

            def forward(self, x):
                return self.head(self.encoder(x).tanh() @ self.decoder.weight)

        return Tied()

    def tf_model(self):
        import keras

        class Tied(keras.Model):
            def __init__(self):
                super().__init__()
                self.encoder, self.head = keras.layers.Dense(6, use_bias=False), keras.layers.Dense(3)

            def call(self, inputs):
                hidden = keras.ops.tanh(self.encoder(inputs))
                return self.head(keras.ops.matmul(hidden, keras.ops.transpose(self.encoder.kernel)))

        model = Tied()
        model(keras.ops.zeros((1, 4)))
        return model


class OneLayerInTwoPlaces(Model):
    """A module that two others hold: its parameters have two names."""

    judge = Judge(workers=(2,))

    def torch_model(self):
        from torch import nn

        shared = nn.Linear(4, 4)
        first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.LayerNorm(4), shared)
        return nn.Sequential(first, second, nn.Linear(4, 3))

    def tf_model(self):
        import keras

        class Block(keras.layers.Layer):
            def __init__(self, shared, **options):
                super().__init__(**options)
                self.shared, self.norm = shared, keras.layers.LayerNormalization()

            def call(self, inputs):
                return self.shared(self.norm(inputs))

        shared, inputs = keras.layers.Dense(4, "tanh", name="shared"), keras.Input((4,))
        hidden = Block(shared, name="second")(Block(shared, name="first")(inputs))
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))


class ListsAndDicts(Model):
    """Parameters in lists and dicts, whose keys have unusual characters, and a parameter without axes."""

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, x):
            hidden = (
                self.scale * x @ self.weights[0]
                + self.shifts["0"]
                + self.shifts["a/b"] * (x @ self.weights[1])
            )
            return self.parts["->"](hidden) + self.parts["a b"](hidden)

        return module(
            forward,
            weights=nn.ParameterList([nn.Parameter(torch.randn(4, 3)) for _ in range(2)]),
            shifts=nn.ParameterDict({"0": torch.zeros(3), "a/b": torch.ones(3)}),
            scale=nn.Parameter(torch.tensor(0.5)),
            parts=nn.ModuleDict({"->": nn.Linear(3, 3), "a b": nn.Linear(3, 3)}),
        )

    def tf_model(self):
        import keras

        class Lists(keras.Model):
            def __init__(self):
                super().__init__()
                self.weights_of = [self.add_weight(shape=(4, 3), name=f"w{i}") for i in range(2)]
                self.scale = self.add_weight(shape=(), initializer="ones")
                self.parts = {"->": keras.layers.Dense(3), "a b": keras.layers.Dense(3)}

            def call(self, inputs):
                hidden = self.scale * inputs @ self.weights_of[0] + inputs @ self.weights_of[1]
                return self.parts["->"](hidden) + self.parts["a b"](hidden)

        model = Lists()
        model(keras.ops.zeros((1, 4)))
        return model


class Lazy(Model):
    """Layers whose shapes the first batch decides, called once in the method that makes the model."""

    def torch_model(self):
        import torch
        from torch import nn

        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
        model(torch.zeros(1, 4))
        return model


class LazyNeverCalled(Lazy):
    """The same, not called before: there are no weights yet, which PyTorch's own loop allows."""

    judge = Judge(workers=(1,), refused=("Call a model with lazy modules once in torch_model()",))

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))


class Unused(Model):
    """Parameters that no gradient reaches are not decayed, as PyTorch's optimizers leave them out."""

    defaults = DECAYED

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, x):
            return self.used(x) + (0 if self.training else self.unused)  # evaluation shows it

        return module(forward, used=nn.Linear(4, 3), unused=nn.Parameter(torch.arange(3.0)))

    def tf_model(self):
        import keras

        class Unused(keras.Model):
            def __init__(self):
                super().__init__()
                self.used = keras.layers.Dense(3)
                self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

            def call(self, x, training=False):
                return self.used(x) + (0 if training else self.unused)

        model = Unused()
        model(keras.ops.zeros((1, 4)))
        return model


class UnusedWithAdamW(Unused):
    """A Keras optimizer of the task's own neither decays nor moves them."""

    judge = Judge(frameworks=("tf",), workers=(2,))

    def tf_optimizer(self):
        import keras

        return keras.optimizers.AdamW(0.1, weight_decay=0.1)


class UsedInSomeSteps(Model):
    """A branch that only some batches take, the same on all workers: no gradient, no decay, no momentum."""

    defaults = DECAYED

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, x):
            if self.training:
                self.calls += 1
            is_used = not self.training or (self.calls > 0 and self.calls % 2 == 1)
            return self.main(x) + (self.side(x) if is_used else 0)

        return module(
            forward, main=nn.Linear(4, 3), side=nn.Linear(4, 3), calls=torch.zeros((), dtype=torch.long)
        )


class UsedBySomeSamples(Model):
    """Experts of which each sample takes one; those of a worker's samples may not be all."""

    defaults = DECAYED

    def torch_model(self):
        from torch import nn

        def forward(self, x):
            chances, chosen = self.gate(x).softmax(-1).max(-1)
            out = x.new_zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, chances[rows, None] * expert(x[rows]))
            return out

        return module(
            forward, gate=nn.Linear(4, 12), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(12))
        )


class Parametrized(Model):
    """A weight that is kept symmetric, and one that is kept orthogonal."""

    judge = Judge(workers=(1,))

    def torch_model(self):
        from torch import nn
        from torch.nn.utils import parametrizations, parametrize

        class Symmetric(nn.Module):
            def forward(self, x):
                return x.triu() + x.triu(1).transpose(-1, -2)

        first = parametrizations.orthogonal(nn.Linear(4, 4))
        second = nn.Linear(4, 4)
        parametrize.register_parametrization(second, "weight", Symmetric())
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3))


class LowRank(Model):
    """Layers of Keras with factors of low rank: LoRA; modes.py has it in PyTorch."""

    def tf_model(self):
        import keras
        from keras.layers import Dense

        model = keras.Sequential([keras.Input((4,)), Dense(8, "gelu", name="a"), Dense(3, name="b")])
        for layer in model.layers:
            layer.enable_lora(2)
        return model


class Ensemble(Model):
    """Several models in one, called by torch.func over stacked parameters."""

    def torch_model(self):
        from torch import nn
        from torch.func import functional_call, stack_module_state, vmap

        class Ensemble(nn.Module):
            def __init__(self):
                super().__init__()
                members = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]
                parameters, _ = stack_module_state(members)
                self.names = list(parameters)
                self.stacked = nn.ParameterList(parameters.values())
                self.member = [members[0].to("meta")]  # in a list: it is no part of the model

            def forward(self, x):
                def one(*values):
                    return functional_call(self.member[0], dict(zip(self.names, values, strict=True)), (x,))

                return vmap(one)(*self.stacked).mean(0)

        return Ensemble()


class Constrained(Model):
    """Kernels whose norm a constraint bounds after each step; a bias that is not negative."""

    def tf_model(self):
        import keras

        bounded = keras.layers.Dense(
            8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg"
        )
        return keras.Sequential([keras.Input((4,)), bounded, keras.layers.Dense(3)])


class Regularized(Model):
    """Terms of kernels, of biases and of a layer's own; those of weights count once with several workers."""

    def tf_model(self):
        import keras

        class Own(keras.layers.Dense):
            def call(self, inputs):
                self.add_loss(0.01 * keras.ops.sum(keras.ops.abs(self.kernel)))
                return super().call(inputs)

        penalized = keras.layers.Dense(8, "tanh", kernel_regularizer="l2", bias_regularizer="l1")
        orthogonal = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.OrthogonalRegularizer())
        return keras.Sequential([keras.Input((4,)), penalized, orthogonal, Own(3)])


class UsedLater(UsedInSomeSteps):
    """The same with Adam of the task, which has slots only for what it has updated; the branch comes late."""

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.AdamW(parameters, 0.1, weight_decay=0.1)

    def torch_model(self):
        model = super().torch_model()
        model.calls -= 3  # the first two steps, after which the run is resumed, do not use it
        return model


class AdamOfGroups(Model):
    """Groups with rates of their own, no decay for biases, AMSGrad."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "learning_rate": 0.05}

    def torch_model(self):
        import torch

        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        return self.model

    def torch_optimizer(self, parameters):
        import torch

        bias = [p for p in parameters if p.ndim == 1]
        rest = [p for p in parameters if p.ndim > 1]
        groups = [
            {"params": bias, "weight_decay": 0.0, "lr": 0.01},
            {"params": rest, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
