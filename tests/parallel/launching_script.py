"""Launch workers from a script: one function trains, fails, trains again, predicts and evaluates."""

import json
import sys

import numpy as np

import hvdtrain
from hvdtrain.tasks.digits import Digits

FRAMEWORK, CONTROLLER = sys.argv[1:3]


class Mine(Digits):
    """Known to this script alone."""


class WithoutData(Digits):
    def train_data(self):
        raise ValueError("there is no data")


def fails(**fields):
    try:
        hvdtrain.train(framework=FRAMEWORK, quiet=True, **fields)
    except hvdtrain.errors.HvdtrainError as error:
        return type(error).__name__
    return "nothing"


def work(steps):
    failures = [
        fails(task=Mine, steps=5, learning_rate=1e30, momentum=0.0, log_every=1, run_dir="nan"),
        fails(task=WithoutData, steps=2, run_dir="none"),
        fails(task=Mine, steps=2, keep_best="f1", run_dir="none"),
    ]
    options = {"framework": FRAMEWORK, "run_dir": "run", "quiet": True, "eval_every": 10}
    hvdtrain.train(Mine, steps=steps // 2, **options)
    summary = hvdtrain.train(Mine, steps=steps, resume="auto", **options)
    predicted = hvdtrain.predict("run", Mine, quiet=True)
    metrics = hvdtrain.evaluate("run", Mine, quiet=True)
    digest = [
        len(summary.history),
        sorted(summary.best),
        float(np.sum(predicted["outputs"])),
        metrics["loss"],
    ]
    print("DIGEST", json.dumps(digest), flush=True)
    return failures, summary, predicted, metrics


if __name__ == "__main__":
    failures, summary, predicted, metrics = hvdtrain.launch(work, args=(40,), controller=CONTROLLER)
    model = hvdtrain.load("run", Mine, framework=FRAMEWORK)
    exported = hvdtrain.export("run", "pt" if FRAMEWORK == "torch" else "keras", Mine)
    inputs = Mine().eval_data().batch(np.arange(50))["inputs"]
    if FRAMEWORK == "torch":
        import torch

        imported = hvdtrain.import_weights(exported.path, "imported", Mine)
        outputs = model(torch.from_numpy(inputs)).detach().numpy()
    else:
        imported = hvdtrain.import_weights(exported.path, "imported", Mine)
        outputs = model(inputs).numpy()
    again = hvdtrain.predict(imported.path, Mine, framework=FRAMEWORK, output="out.npz", quiet=True)
    found = {
        "failures": failures,
        "phases": [[record["phase"], record["step"]] for record in summary.history],
        "best": {name: [best.value, best.step] for name, best in summary.best.items()},
        "loss": metrics["loss"],
        "rows": len(predicted["outputs"]),
        "difference": float(np.abs(outputs - predicted["outputs"][:50]).max()),
        "imported": float(np.abs(np.load(again)["outputs"] - predicted["outputs"]).max()),
    }
    print("FOUND", json.dumps(found))
