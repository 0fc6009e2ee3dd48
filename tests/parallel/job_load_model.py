"""Write kernel and bias of the model that hvdtrain.load returns, checked to be ready for evaluation."""

import json
import sys

import hvdtrain

checkpoint, task, framework, output = sys.argv[1:]
model = hvdtrain.load(checkpoint, task, framework=framework)
if framework == "torch":
    assert not model.training
    kernel, bias = model.weight.detach().numpy().T, model.bias.detach().numpy()
else:
    kernel, bias = model.get_weights()
with open(output, "w") as file:
    json.dump([kernel.tolist(), bias.tolist()], file)
