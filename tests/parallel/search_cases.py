"""What pools run for test_search.py, and the tasks of its jobs."""

import numpy as np

import hvdtrain
from hvdtrain.tasks.digits import Digits

LARGEST = 4  # samples that fit at once


class OneModel(Digits):
    """Digits whose model is made once, as a notebook may have it."""

    def torch_model(self):
        if not hasattr(self, "model"):
            self.model = super().torch_model()
            self.before = weights_of(self.model, "torch")
        return self.model

    def tf_model(self):
        if not hasattr(self, "model"):
            self.model = super().tf_model()
            self.before = weights_of(self.model, "tf")
        return self.model


class Large(Digits):
    """Digits whose larger batches do not fit: their loss raises what lack of memory raises."""

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        _check_fits(batch)
        return cross_entropy(model(batch["inputs"]), batch["targets"].long(), reduction="none"), {}

    def tf_loss(self, model, batch):
        from keras.losses import sparse_categorical_crossentropy

        _check_fits(batch)
        return sparse_categorical_crossentropy(batch["targets"], model(batch["inputs"]), from_logits=True), {}


def _check_fits(batch) -> None:
    if batch["inputs"].shape[0] > LARGEST:
        raise MemoryError(f"a batch of {batch['inputs'].shape[0]}")


def weights_of(model, framework: str) -> list[np.ndarray]:
    if framework == "torch":
        return [value.detach().numpy().copy() for value in model.state_dict().values()]
    return [np.array(value) for value in model.get_weights()]


def found_from_python(framework: str) -> dict:
    """Find a rate with a model that the task keeps; return what was found, and whether its weights stayed."""
    task = OneModel()
    found = hvdtrain.lr_find(
        task,
        framework=framework,
        device="cpu",
        threads=1,
        initial_parameters="model",  # the model's own, so that the weights before are those of the training
        rising_steps=40,
        lowest_rate=1e-3,
        highest_rate=1e3,
    )
    after = weights_of(task.model, framework)
    same = all(np.array_equal(one, other) for one, other in zip(task.before, after, strict=True))
    shown = {"suggestion": found.suggestion, "diverged": found.diverged, "rates": len(found.rates)}
    return {"same": same, **shown}


def found_after_init(framework: str) -> list[bool]:
    """Find a rate from the weights of a run; return whether the model has them after it, and not its own."""
    trained = OneModel()
    options = {"framework": framework, "device": "cpu", "threads": 1}
    hvdtrain.train(trained, steps=3, run_dir="run", quiet=True, **options)
    task = OneModel()
    hvdtrain.lr_find(task, init="run", rising_steps=20, lowest_rate=1e-3, **options)
    after, wanted = weights_of(task.model, framework), weights_of(trained.model, framework)
    return [
        all(np.array_equal(one, other) for one, other in zip(after, weights, strict=True))
        for weights in (wanted, task.before)
    ]
