"""The jobs with hvdtrain: horovodrun -np 2 python with_hvdtrain.py JOB."""

import sys

import common
import numpy as np

import hvdtrain


class Digits:
    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}

    def train_data(self):
        return common.TRAIN

    def eval_data(self):
        return common.EVAL

    def torch_model(self):
        return common.torch_model()


def run(job, task=Digits, **fields):
    length = {} if "steps" in fields else {"epochs": 5}
    settings = {"global_batch_size": 32, "learning_rate": 0.1, "device": "cpu", **length, **fields}
    return hvdtrain.train(task, framework="torch", run_dir=common.FOLDER / job, **settings)


def train():
    return run("train").final


def f1():
    class Scored(Digits):
        metrics = {"f1": "f1"}

    return run("f1", Scored).final


def schedule():
    return run("schedule", warmup_steps=20, lr_schedule="cosine", clip_norm=1.0, accumulate=2).final


def best():
    run("best", keep_best="accuracy")
    return hvdtrain.evaluate(common.FOLDER / "best", Digits, best=True)


def resume():
    run("resume", steps=100)
    return run("resume", resume="auto").final


def early_stopping():
    done = run("early", epochs=50, early_stopping="accuracy", early_stopping_patience=2)
    return {"steps": done.steps, **done.final}


def class_weights():
    class Weighted(Digits):
        class_weights = [1.0] * 5 + [2.0] * 5

    return run("weights", Weighted).final


def average():
    return run("average", ema_decay=0.95).final


def learning_rate():
    found = hvdtrain.lr_find(Digits, framework="torch", global_batch_size=32, device="cpu")
    return {"learning_rate": found.suggestion}


def contrastive():
    class Contrastive(Digits):
        metrics = {}

        def torch_model(self):
            return common.torch_model(16)

        def torch_loss(self, model, batch):
            from torch.nn.functional import cross_entropy, normalize

            embedded = normalize(model(batch["inputs"]), dim=1)
            noisy = normalize(model(batch["inputs"] + 0.1), dim=1)
            others, own = hvdtrain.all_gather(noisy, positions=True)
            return cross_entropy(embedded @ others.T / 0.1, own, reduction="none"), {}

    return run("contrastive", Contrastive).final


def pictures():
    class Wrong:
        def on_start(self, context):
            self.context = context

        def on_evaluation(self, step, metrics):
            import torch

            inputs, targets = common.EVAL
            wrong = self.context.model(torch.from_numpy(inputs)).argmax(1).numpy() != targets
            self.context.log(step, {"wrong": common.picture(inputs[wrong])})

    class Watched(Digits):
        def callbacks(self):
            return [Wrong()]

    return run("pictures", Watched).final


def serve():
    run("serve")
    hvdtrain.export(common.FOLDER / "serve", "onnx", Digits)
    outputs = hvdtrain.predict(common.FOLDER / "serve", Digits)["outputs"]
    return {"accuracy": float(np.mean(outputs.argmax(1) == common.EVAL[1]))}


JOBS = [train, f1, schedule, best, resume, early_stopping, class_weights, average, learning_rate, contrastive]
JOBS += [pictures, serve]

if __name__ == "__main__":
    print("result:", {job.__name__: job for job in JOBS}[sys.argv[1]]())
