"""The jobs with Lightning: python with_lightning.py JOB, which starts the second process itself."""

import sys

import common
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, F1Score


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = common.torch_model()
        self.score = Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = cross_entropy(self.model(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        outputs = self.model(inputs)
        self.score(outputs, targets)
        self.log("loss", cross_entropy(outputs, targets), sync_dist=True)
        self.log("accuracy", self.score)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaders():
    train_set, eval_set = common.torch_sets()
    return DataLoader(train_set, 16, shuffle=True), DataLoader(eval_set, 16)


def run(job, module=None, ckpt_path=None, **options):
    settings = {"max_epochs": 5, "accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    trainer = L.Trainer(default_root_dir=common.FOLDER / job, **(settings | options))
    trainer.fit(module or Digits(), *loaders(), ckpt_path=ckpt_path)
    return trainer


def results(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def train():
    return results(run("train"))


def f1():
    class Scored(Digits):
        def __init__(self):
            super().__init__()
            self.score = F1Score("multiclass", num_classes=10, average="macro")

    return results(run("f1", Scored()))


def schedule():
    class Scheduled(Digits):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 20)
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [20])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}

    return results(run("schedule", Scheduled(), gradient_clip_val=1.0, accumulate_grad_batches=2))


def best():
    keep = ModelCheckpoint(monitor="accuracy", mode="max")
    trainer = run("best", callbacks=[keep])
    trainer.validate(ckpt_path="best", dataloaders=loaders()[1])
    return results(trainer)


def resume():
    keep = ModelCheckpoint(common.FOLDER / "resume", "last", every_n_train_steps=100)
    run("resume", max_steps=100, callbacks=[keep])
    return results(run("resume", ckpt_path=common.FOLDER / "resume" / "last.ckpt"))


def early_stopping():
    stop = EarlyStopping("accuracy", mode="max", patience=2)
    trainer = run("early", max_epochs=50, callbacks=[stop])
    return {"steps": trainer.global_step, **results(trainer)}


def class_weights():
    class Weighted(Digits):
        weights = torch.tensor([1.0] * 5 + [2.0] * 5)

        def training_step(self, batch, index):
            inputs, targets = batch
            return cross_entropy(self.model(inputs), targets, self.weights.to(self.device))

    return results(run("weights", Weighted()))


def average():
    function = torch.optim.swa_utils.get_ema_avg_fn(0.95)
    return results(run("average", callbacks=[WeightAveraging(avg_fn=function)]))


def learning_rate():
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=5)

    class Searched(Digits):
        learning_rate = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)

    found = L.pytorch.tuner.Tuner(trainer).lr_find(Searched(), *loaders())
    return {"learning_rate": found.suggestion()}


def contrastive():
    class Contrastive(Digits):
        def __init__(self):
            super().__init__()
            self.model = common.torch_model(16)

        def compare(self, inputs):
            embedded = normalize(self.model(inputs), dim=1)
            noisy = normalize(self.model(inputs + 0.1), dim=1)
            others = self.all_gather(noisy, sync_grads=True).flatten(0, 1)
            own = torch.arange(len(inputs), device=self.device) + self.global_rank * len(inputs)
            return cross_entropy(embedded @ others.T / 0.1, own)

        def training_step(self, batch, index):
            return self.compare(batch[0])

        def validation_step(self, batch, index):
            self.log("loss", self.compare(batch[0]), sync_dist=True)

    return results(run("contrastive", Contrastive()))


def pictures():
    class Watched(Digits):
        def on_validation_epoch_end(self):
            inputs, targets = map(torch.from_numpy, common.EVAL)
            wrong = self.model(inputs.to(self.device)).argmax(1).cpu() != targets
            image = common.picture(inputs[wrong].numpy())
            self.logger.experiment.add_image("wrong", image, self.global_step, dataformats="HW")

    from lightning.pytorch.loggers import TensorBoardLogger

    return results(run("pictures", Watched(), logger=TensorBoardLogger(common.FOLDER / "pictures")))


def serve():
    class Served(Digits):
        def forward(self, inputs):
            return self.model(inputs)

        def predict_step(self, batch, index):
            return self(batch[0])

    trainer = run("serve", Served())
    if trainer.is_global_zero:
        module = trainer.lightning_module.cpu()
        module.to_onnx(common.FOLDER / "serve" / "model.onnx", torch.zeros(1, 64), dynamo=True)
        one = L.Trainer(accelerator="cpu", devices=1, logger=False)
        outputs = torch.cat(one.predict(module, loaders()[1])).argmax(1).numpy()
        return {"accuracy": float((outputs == common.EVAL[1]).mean())}
    return None


JOBS = [train, f1, schedule, best, resume, early_stopping, class_weights, average, learning_rate, contrastive]
JOBS += [pictures, serve]

if __name__ == "__main__":
    print("result:", {job.__name__: job for job in JOBS}[sys.argv[1]]())
