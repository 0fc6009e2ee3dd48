"""Fixed random data of any shape, to measure training speed; there is nothing to learn in it."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain.errors import DataError
from hvdtrain.models import bert, gpt
from hvdtrain.models.choose import BuiltIn, ImageModel, module_and_sizes
from hvdtrain.task import Arrays
from hvdtrain.tasks import _options as options

_STORED_BYTES = 1 << 24  # of inputs; a larger data set repeats them
_SAMPLE_BYTES = 1 << 30  # a larger sample is a typing error


class RandomSamples:
    """Random numbers or tokens with random targets, the same whenever the seed is the same."""

    def __init__(
        self, size: int, *, shape: Sequence[int], vocabulary: int | None, classes: int | None, seed: int
    ) -> None:
        sample_bytes = 4 * math.prod(shape)
        if sample_bytes > _SAMPLE_BYTES:
            raise DataError(f"one sample of shape {list(shape)} would take {sample_bytes / 2**30:,.1f} GiB")
        self._size = size
        self.distinct = min(size, max(1, _STORED_BYTES // sample_bytes))
        random = np.random.RandomState(seed)  # its numbers are the same in all versions of numpy
        self._inputs: NDArray[Any]
        if vocabulary is None:
            self._inputs = random.standard_normal((self.distinct, *shape)).astype(np.float32)
        else:
            tokens = random.randint(0, vocabulary, (self.distinct, *shape[:-1], shape[-1] + 1), np.int32)
            self._inputs, self._targets = tokens[..., :-1], tokens[..., 1:].astype(np.int64)
        if classes is not None:
            self._targets = random.randint(0, classes, self.distinct, np.int64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Arrays:
        return {name: values[0] for name, values in self.batch(np.asarray([index])).items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples at once."""
        stored = indices % self.distinct
        return {"inputs": self._inputs[stored], "targets": self._targets[stored]}


TEXT_MODELS: dict[str, ModuleType] = {"gpt": gpt, "bert": bert}


class Synthetic(BuiltIn):
    """Train a built-in model on random numbers.

    Args:
        model: a model for images (mlp, convnet, resnet18, resnet34, resnet50), or for text: "gpt"
            (predicts the next token) or "bert" (predicts the class).
        samples: number of training samples.
        eval_samples: number of evaluation samples; 0 for no evaluation.
        classes: number of classes, if the model predicts one.
        seed: seed of the random numbers.
        shape: height, width and channels of an image.
        vocabulary: number of different tokens.
        context: tokens of a text.
        layers: layers of a model for text.
        heads: attention heads of each layer of gpt and bert.
        channels: width of a model for text.
        dropout: fraction of activations that gpt and bert drop in training.
    """

    class_axis = -1  # a context can be as long as the vocabulary
    defaults: ClassVar = {
        "steps": 100,
        "batch_size": 32,
        "learning_rate": 0.01,
        "lr_scaling": "none",
        "clip_norm": 1.0,
        "initial_parameters": "portable",
    }

    @options.checked
    def __init__(
        self,
        *,
        model: Literal[ImageModel, "gpt", "bert"] = "resnet18",
        samples: Annotated[int, Field(ge=1, le=1 << 62)] = 50_000,
        eval_samples: Annotated[int, Field(ge=0, le=1 << 62)] = 0,
        classes: options.Classes = 10,
        seed: options.Seed = 0,
        shape: Annotated[Sequence[options.Count], Field(min_length=3, max_length=3)] = (32, 32, 3),
        vocabulary: options.Classes = 1000,
        context: options.Count = 64,
        layers: options.Layers = 4,
        heads: options.Layers = 4,
        channels: options.Count = 128,
        dropout: options.Fraction = 0.0,
    ) -> None:
        self._model, self._classes = model, classes
        self._sizes: dict[str, Any] = {"vocabulary": vocabulary, "context": context, "layers": layers}
        self._sizes |= {"heads": heads, "channels": channels, "dropout": dropout}
        self._shape: Any = (context,) if model in TEXT_MODELS else tuple(shape)
        kinds: dict[str, Any] = {
            "shape": self._shape,
            "vocabulary": vocabulary if model in TEXT_MODELS else None,
            "classes": None if model == "gpt" else classes,
        }
        self._train = RandomSamples(samples, seed=seed, **kinds)
        self._eval = RandomSamples(eval_samples, seed=seed + 1, **kinds) if eval_samples else None

    def describe(self) -> str:
        """Return a description of the data."""
        if self._model in TEXT_MODELS:
            what = f"texts of {self._sizes['context']:,} random tokens"
        else:
            what = f"random images {'x'.join(map(str, self._shape))}"
        classes = "" if self._model == "gpt" else f" in {self._classes:,} classes"
        again = (
            f", {self._train.distinct:,} different ones" if self._train.distinct < len(self._train) else ""
        )
        evaluation = f", {len(self._eval):,} to evaluate" if self._eval is not None else ""
        return f"{len(self._train):,} {what}{classes}{again}{evaluation}"

    def train_data(self) -> RandomSamples:
        """Return the training data: inputs of the given shape; targets, the class or the next tokens."""
        return self._train

    def eval_data(self) -> RandomSamples | None:
        """Return the evaluation data, of the same form, from the next seed."""
        return self._eval

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        if self._model not in TEXT_MODELS:
            return module_and_sizes(self._model, self._shape, self._classes)
        classes = {} if self._model == "gpt" else {"classes": self._classes}
        return TEXT_MODELS[self._model], self._sizes | classes


task = Synthetic
