"""Kinds of models: graphs, series, groups of parameters."""

import types

import numpy as np
from conformance.zoo import EVALUATED, GRADIENT_DESCENT, SAMPLES, Judge, Model, X, Y

RANDOM = np.random.RandomState(1)
GRAPHS = RANDOM.randint(0, 5, (SAMPLES, 6, 2))
WALKS = np.cumsum(RANDOM.randn(SAMPLES, 11), 1).astype(np.float32)
TWO = Judge(workers=(2,))


class GraphNet(Model):
    """Messages along edges, summed by nodes and pooled by graphs: a batch of graphs is one large graph."""

    judge = TWO

    def train_data(self):
        nodes = np.repeat(X[:, None], 5, 1) * np.arange(5, dtype=np.float32)[:, None]
        return {"inputs": {"nodes": nodes, "edges": GRAPHS}, "targets": Y}

    def eval_data(self):
        data = self.train_data()
        return {"inputs": {k: v[:EVALUATED] for k, v in data["inputs"].items()}, "targets": Y[:EVALUATED]}

    def plain_outputs(self, model, inputs):
        return model(**inputs)

    def torch_model(self):
        import torch
        from torch import nn

        class Graph(nn.Module):
            def __init__(self):
                super().__init__()
                self.message, self.update, self.head = nn.Linear(4, 6), nn.Linear(10, 6), nn.Linear(6, 3)

            def forward(self, nodes, edges):
                batch, count, _ = nodes.shape
                flat = nodes.reshape(batch * count, -1)
                first, second = (edges + count * torch.arange(batch)[:, None, None]).reshape(-1, 2).T
                sums = flat.new_zeros(len(flat), 6).index_add(0, second, self.message(flat)[first].relu())
                hidden = self.update(torch.cat([flat, sums], -1)).tanh()
                graph = torch.arange(batch).repeat_interleave(count)
                sums = hidden.new_zeros(batch, 6).index_add(0, graph, hidden)
                return self.head(sums / torch.bincount(graph)[:, None])

        torch.manual_seed(0)
        return Graph()


class Forecast(Model):
    """Several steps of a series at once, relative to its last value, by causal convolutions."""

    judge = TWO
    loss = "mae"

    def train_data(self):
        return WALKS[:, :8, None], WALKS[:, 8:, None]

    def eval_data(self):
        return tuple(a[:EVALUATED] for a in self.train_data())

    def torch_model(self):
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.convs = nn.ModuleList([nn.Conv1d(1, 4, 2), nn.Conv1d(4, 4, 2, dilation=2)])
                self.head = nn.Linear(4, 3)

            def forward(self, x):
                last = x[:, -1:]
                h = (x - last).transpose(1, 2)
                for c in self.convs:
                    h = c(nn.functional.pad(h, (c.dilation[0], 0))).relu()
                return self.head(h[..., -1])[..., None] + last

        torch.manual_seed(0)
        return Net()

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers, inputs = keras.layers, keras.Input((8, 1))
        last = inputs[:, -1:]
        hidden = inputs - last
        for dilation in (1, 2):
            causal = {"padding": "causal", "dilation_rate": dilation, "activation": "relu"}
            hidden = layers.Conv1D(4, 2, **causal)(hidden)
        return keras.Model(inputs, layers.Reshape((3, 1))(layers.Dense(3)(hidden[:, -1])) + last)


class AdamOfGroups(Model):
    """Groups with rates of their own, no decay for biases, AMSGrad."""

    judge = TWO
    defaults = types.MappingProxyType({**GRADIENT_DESCENT, "learning_rate": 0.05})

    def torch_model(self):
        import torch

        torch.manual_seed(0)
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
