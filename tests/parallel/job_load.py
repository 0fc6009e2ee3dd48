"""Load exports by the lines that say how to, and give each one's loss on the evaluation data."""

import importlib
import json
import sys

import numpy as np

from hvdtrain.tasks.digits import Digits

framework, lines = sys.argv[1], json.loads(sys.argv[2])
known = ("torch", "safetensors.torch", "onnxruntime") if framework == "torch" else ("keras",)
names = {name.partition(".")[0]: importlib.import_module(name) for name in known}
names = {name: sys.modules[name] for name in names}
if framework == "tf":
    names["tf"] = importlib.import_module("tensorflow")
task = Digits()
data = task.eval_data().batch(np.arange(len(task.eval_data())))


def to_numpy(outputs):
    if isinstance(outputs, dict):
        (outputs,) = outputs.values()
    if isinstance(outputs, list):
        (outputs,) = outputs
    return outputs.detach().numpy() if hasattr(outputs, "detach") else np.asarray(outputs)


for line in lines:
    inputs = data["inputs"]
    if framework == "torch":
        model = task.torch_model()
        names["model"] = model.eval()
        inputs = inputs if "onnx" in line else names["torch"].from_numpy(inputs)
    names["inputs"] = inputs
    loaded = eval(line, names)  # the line is what a user would type
    if "load_state_dict" in line:
        loaded = model(inputs)
    elif "load_model" in line:
        loaded = loaded(inputs)
    logits = to_numpy(loaded).astype(np.float64)
    likelihood = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses = -likelihood[np.arange(len(logits)), data["targets"]]
    print("LOSS", losses.mean())
