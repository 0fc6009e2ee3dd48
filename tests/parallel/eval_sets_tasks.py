"""A task with two evaluation sets, the same task with the second alone, and what pools run of them."""

import json
from pathlib import Path

import numpy as np
from small_task import INPUTS, OUTPUTS, Small

import hvdtrain

FIRST_SIZE, SECOND_SIZE = 30, 17


class TwoSets(Small):
    """Sizes that neither the batch nor two or three workers divide; a layer with moving statistics."""

    state_names = {"torch": {"0": "norm", "1": "dense"}}  # noqa: RUF012

    def eval_data(self):
        inputs, targets = self.data
        noise = np.random.RandomState(5).randn(SECOND_SIZE, INPUTS).astype("float32")
        return hvdtrain.EvalSets(
            validation={"inputs": inputs[:FIRST_SIZE], "targets": targets[:FIRST_SIZE]},
            noisy=(inputs[-SECOND_SIZE:] + noise, targets[-SECOND_SIZE:]),
        )

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.BatchNorm1d(INPUTS, eps=1e-3, momentum=0.01), nn.Linear(INPUTS, OUTPUTS))

    def tf_model(self):
        import keras

        layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(OUTPUTS, name="dense")]
        return keras.Sequential([keras.Input((INPUTS,)), *layers])


class SecondAlone(TwoSets):
    """The second set is all there is to evaluate."""

    def eval_data(self):
        return super().eval_data()["noisy"]


def evaluated(framework: str) -> dict[str, dict[str, float]]:
    """Train both tasks; return their last evaluations, and that of the first one's checkpoint."""
    found = {}
    for task in (TwoSets, SecondAlone):
        summary = hvdtrain.train(
            task, framework=framework, run_dir=task.__name__, device="cpu", steps=4, global_batch_size=12,
            eval_batch_size=4, eval_every=2, sync_batch_norm=True, ema_decay=0.9, log_every=4,
        )  # fmt: skip
        found[task.__name__] = summary.final
    found["evaluate"] = hvdtrain.evaluate(TwoSets.__name__, TwoSets)
    lines = [json.loads(line) for line in Path(TwoSets.__name__, "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["phase"] == "eval"][-1]
    found["log"] = {name: last[name] for name in found["evaluate"]}
    return found
