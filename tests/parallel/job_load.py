"""Load exports by the lines that say how to, and give each one's loss on the evaluation data."""

import json
import sys

import numpy as np

from hvdtrain.tasks.digits import Digits

framework, lines = sys.argv[1], json.loads(sys.argv[2])
task = Digits()
data = task.eval_data().batch(np.arange(len(task.eval_data())))
names = {"inputs": data["inputs"]}
if framework == "torch":
    exec("import torch, safetensors.torch, onnxruntime", names)
    names["model"] = task.torch_model().eval()
    tensor = names["torch"].from_numpy(data["inputs"])
else:
    exec("import keras, tensorflow as tf", names)

for line in lines:
    names["inputs"] = data["inputs"] if framework == "tf" or "onnx" in line else tensor
    outputs = eval(line, names)  # the line is what a user would type
    if "load_state_dict" in line:
        outputs = names["model"](tensor)
    elif "load_model" in line:
        outputs = outputs(data["inputs"])
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list):
        (outputs,) = outputs
    logits = (outputs.detach().numpy() if hasattr(outputs, "detach") else np.asarray(outputs)).astype(float)
    likelihood = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    print("LOSS", -likelihood[np.arange(len(logits)), data["targets"]].mean())
