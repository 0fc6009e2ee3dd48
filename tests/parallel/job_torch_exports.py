"""Models that exporting could get wrong: what comes of each form, checked in one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.backends.torch.export import export_model
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

BATCH = 8


def statistics():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def shared():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.SiLU(), second)


class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(BATCH, 6))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        return {"z": self.one(x), "a": (self.other(x), x)}


class Hidden(nn.Linear):
    """Computes with numbers that are not in its state."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("hidden", torch.rand(6), persistent=False)

    def forward(self, x):
        return super().forward(x * self.hidden)


def no_objective(model, batch):
    raise AssertionError("the model is called on its inputs")


def export(make_model, form, objective=no_objective, name="inputs"):
    torch.manual_seed(1)
    arrays = {name: np.random.RandomState(0).randn(1, BATCH, 6).astype("float32")}
    ones = np.ones((1, BATCH), "float32")
    batch = HostBatch(0, arrays, ones, float(BATCH), np.arange(BATCH)[None])
    suffix = {"safetensors": ".safetensors", "torch-export": ".pt2"}.get(form, f".{form}")
    path = Path(f"{getattr(make_model, '__name__', 'model')}{suffix}")
    done = export_model(make_model(), make_model, objective, form, path, batch)
    assert path.exists()
    return done


for make in (statistics, shared):
    for form in ("safetensors", "pt", "onnx"):
        done = export(make, form)
        assert (done.relative < 1e-5, done.batch) == (True, "any batch size" if form == "onnx" else ""), make
assert export(Heads, "torch-export").relative < 1e-5
assert export(Heads, "onnx").relative < 1e-5
assert export(lambda: Fixed(6, 2), "torch-export").batch == "batches of 8 only"
assert export(lambda: Hidden(6, 2), "safetensors").relative > 1e-2


def own_objective(model, batch):
    return model(batch["words"]).mean(1), {}


assert export(lambda: nn.Linear(6, 2), "pt", own_objective, "words").difference == 0
with pytest.raises(TaskError, match=r"batch\['inputs'\] alone; this task's samples have \['words'\]"):
    export(lambda: nn.Linear(6, 2), "onnx", own_objective, "words")
