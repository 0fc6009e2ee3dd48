"""A task with two evaluation sets, the same task with the second alone, and what pools run of them."""

import json
from pathlib import Path

import numpy as np
from small_task import INPUTS, OUTPUTS, Small

import hvdtrain
from hvdtrain.config import Layer
from hvdtrain.jobs.serving.checkpoint import Call
from hvdtrain.jobs.serving.export import export_checkpoint
from hvdtrain.jobs.serving.predict import predict_checkpoint

FIRST_SIZE, SECOND_SIZE = 30, 17
EXPORTS = {"torch": "pt", "tf": "keras"}


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


def evaluated(framework: str, commands: list[str]) -> dict[str, dict[str, float]]:
    """Train; return the last evaluation as the run and its log have it, and that of the second set alone.

    Args:
        framework: the job's.
        commands: which of ``evaluate``, ``predict`` and ``export`` take the checkpoint too. The loss of the
            predictions is that of the set that is predicted.
    """
    summary = hvdtrain.train(
        TwoSets, framework=framework, run_dir="run", device="cpu", steps=3, global_batch_size=12,
        eval_batch_size=4, sync_batch_norm=True, ema_decay=0.9, log_every=3,
    )  # fmt: skip
    lines = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    logged = {name: lines[-1][name] for name in summary.final}
    found = {"run": summary.final, "log": logged, "alone": hvdtrain.evaluate("run", SecondAlone)}
    call = Call(
        Path("run"), [Layer("test", {"task": f"{__file__}:{TwoSets.__name__}", "framework": framework})]
    )
    if "evaluate" in commands:
        found["evaluate"] = hvdtrain.evaluate("run", TwoSets)
    if "predict" in commands:
        predict_checkpoint(call, Path("predictions.npz"), split="eval")
        predicted, (_, targets) = np.load("predictions.npz")["outputs"], TwoSets().data
        found["predict"] = {"loss": float(((predicted - targets[: len(predicted)]) ** 2).mean())}
    if "export" in commands:
        exported = export_checkpoint(call, EXPORTS[framework])
        found["export"] = {"relative": exported.exported.relative}
    return found
