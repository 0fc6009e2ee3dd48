"""Models that exporting could get wrong, in each form; unit/test_programs.py has what is refused."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import torch
from support.exporting import floats, host_batches, tokens
from torch import nn
from torch.nn import functional as F

from hvdtrain.backends.objective.model_call import Serving
from hvdtrain.backends.torch.export import export_model

SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx", "pt": ".pt"}


def statistics():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def shared():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.SiLU(), second)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        return {"z": self.one(x), "a": (self.other(x), x)}


class Hidden(nn.Linear):
    """Computes with numbers that are not in its state."""

    def __init__(self):
        super().__init__(6, 2)
        self.register_buffer("hidden", torch.rand(6), persistent=False)

    def forward(self, x):
        return super().forward(x * self.hidden)


@dataclass
class Outputs(OrderedDict):
    """As the outputs of Hugging Face's models: a mapping and a dataclass, with fields that may be None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: object = None

    def __post_init__(self):
        for name in ("loss", "logits", "cache"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class Encoder(nn.Module):
    """Attends to the tokens that the mask leaves; as Hugging Face's classifiers, it takes labels."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None, return_dict=True):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.block(x, src_key_padding_mask=mask == 0)
        logits = self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        assert return_dict
        return Outputs(loss, logits, cache=slice(None))


class Seq(nn.Module):
    """Two sequences of lengths that do not depend on one another; one output for each position."""

    def __init__(self):
        super().__init__()
        self.source, self.wanted = nn.Embedding(50, 8), nn.Embedding(50, 8)

    def forward(self, batch, scale):
        return self.wanted(batch["wanted"]) + scale * self.source(batch["source"]).mean(1, keepdim=True)


INPUTS = SimpleNamespace(loss=lambda outputs, batch: 0)


def export(make_model, form, task=INPUTS, batches=None):
    torch.manual_seed(1)
    path = Path(f"{make_model.__name__}{SUFFIXES[form]}")
    path.unlink(missing_ok=True)
    batches = host_batches(floats()) if batches is None else batches
    done = export_model(make_model(), make_model, Serving(task, "torch", None), form, path, batches)
    assert path.exists()
    return done


def run_onnx(make_model, **inputs):
    return onnxruntime.InferenceSession(f"{make_model.__name__}.onnx").run(None, inputs)


def run_exported(make_model, **inputs):
    program = torch.export.load(f"{make_model.__name__}.pt2").module()
    return program(**{name: torch.from_numpy(array) for name, array in inputs.items()})


for make in (statistics, shared):
    for form in ("safetensors", "pt", "onnx"):
        done = export(make, form)
        assert (done.relative < 1e-5, done.batch) == (True, "any batch size" if form == "onnx" else ""), make
    assert done.inputs == ("inputs float32 (batch, 6)",)
    assert done.outputs[0].startswith("outputs (batch, ")
session = onnxruntime.InferenceSession("shared.onnx")
assert [one.name for one in session.get_outputs()] == ["outputs"]
assert session.get_inputs()[0].shape == ["batch", 6]
for form in ("torch-export", "onnx"):
    done = export(Heads, form)
    assert done.relative < 1e-5
    assert done.outputs == ("z (batch, 2)", "a_0 (batch, 3)", "a_1 (batch, 6)")
assert export(Hidden, "safetensors").relative > 1e-2

# the call that training makes, with all its inputs, for every length and batch size; without labels
for form, run in (("onnx", run_onnx), ("torch-export", run_exported)):
    done = export(Encoder, form, INPUTS, host_batches(tokens()))
    assert done.relative < 1e-5
    assert done.batch == "any batch size, any length"
    assert done.inputs == ("input_ids int64 (batch, length)", "attention_mask int64 (batch, length)")
    assert done.outputs == ("logits (batch, 3)",)
    assert any("cache (a slice)" in note for note in done.notes)
    torch.manual_seed(1)
    model = Encoder().eval()
    for size, length in ((1, 1), (3, 7), (5, 40)):
        sample = tokens(size, length)
        inputs = {name: sample[name] for name in ("input_ids", "attention_mask")}
        found = run(Encoder, **inputs)
        expected = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
        logits = found[0] if form == "onnx" else found["logits"].detach().numpy()
        np.testing.assert_allclose(logits, expected.logits.detach().numpy(), atol=1e-5)

# batches of different lengths; a mapping as the argument, and a number that stays as it is
ragged = [
    host_batches({"source": tokens(8, n)["input_ids"], "wanted": tokens(8, m)["input_ids"]})[i]
    for i, (n, m) in enumerate(((9, 5), (7, 6), (9, 4), (3, 5)))
]


def on_mapping(model, batch):
    return model({"source": batch["source"], "wanted": batch["wanted"]}, 0.5)


done = export(Seq, "onnx", SimpleNamespace(torch_serve=on_mapping), ragged)
assert done.relative < 1e-5
assert done.inputs == ("source int64 (batch, length)", "wanted int64 (batch, length_2)")
assert done.outputs == ("outputs (batch, length_2, 8)",)
found = run_onnx(Seq, source=tokens(2, 11)["input_ids"], wanted=tokens(2, 3)["input_ids"])[0]
assert found.shape == (2, 3, 8)
