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

        if len(batch["inputs"]) > LARGEST:
            raise MemoryError(f"a batch of {len(batch['inputs'])}")
        return cross_entropy(model(batch["inputs"]), batch["targets"].long(), reduction="none"), {}


def weights_of(model, framework: str) -> list[np.ndarray]:
    if framework == "torch":
        return [value.detach().numpy().copy() for value in model.state_dict().values()]
    return [np.array(value) for value in model.get_weights()]


def found_from_python(framework: str) -> dict:
    """Find a rate with a model that the task keeps, and again from the weights of a run.

    Returns:
        What was found first; whether the model had its weights again then, and the run's after the second.
    """
    options = {"framework": framework, "device": "cpu", "threads": 1}
    task, trained, tuned = OneModel(), OneModel(), OneModel()
    # the model's own weights, so that those before are those of the training
    rising = {"initial_parameters": "model", "rising_steps": 40, "lowest_rate": 1e-3, "highest_rate": 1e3}
    found = hvdtrain.lr_find(task, **options, **rising)
    hvdtrain.train(trained, steps=3, run_dir="run", quiet=True, **options)
    hvdtrain.lr_find(tuned, init="run", rising_steps=20, lowest_rate=1e-3, **options)
    kept = [(task.model, task.before), (tuned.model, weights_of(trained.model, framework))]
    return {
        "found": [found.suggestion, found.diverged, len(found.rates)],
        "kept": [all(map(np.array_equal, weights_of(model, framework), weights)) for model, weights in kept],
    }
