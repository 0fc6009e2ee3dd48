"""The moving average of a PyTorch model's weights; ``tensorflow/state/ema.py`` does the same for Keras."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hvdtrain.backends.portable.initial_values import PREFIX, share_of_new
from hvdtrain.backends.torch.state.model_state import Field, ModelState


class ExponentialMovingAverage:
    """The average of every trainable tensor; of none where there is no decay.

    Buffers, such as the statistics of batch norm, are not averaged: the model's own go with it.

    Args:
        decay: of the average, per step; None where there is none.

    Attributes:
        decay: of the average, per step; 0 where there is none.
    """

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self.decay = decay or 0.0
        entries = [entry for entry in model.entries if entry.trainable and decay is not None]
        self._weights = [entry.tensor.detach() for entry in entries]
        self._averages = [weight.clone() for weight in self._weights]
        self._paths = [entry.path for entry in entries]
        known = {id(entry.tensor): a for entry, a in zip(entries, self._averages, strict=True)}
        self.fields: list[Field] = [
            replace(field, tensors=tuple(known.get(id(t), t) for t in field.tensors), prefix=PREFIX)
            for field in model.fields
            if any(id(t) in known for t in field.tensors)
        ]

    def renewed(self, model: ModelState) -> "ExponentialMovingAverage":
        """Return the average of the tensors that are trainable now; what is new starts from its weights."""
        found = ExponentialMovingAverage(model, self.decay or None)
        known = dict(zip(self._paths, self._averages, strict=True))
        for path, average in zip(found._paths, found._averages, strict=True):
            average.copy_(known.get(path, average))
        return found

    def share(self, step: int) -> float:
        """Return the part of the average that a step's weights make up."""
        return share_of_new(step, self.decay)

    def update(self, share: float) -> None:
        """Take in the weights that a step has given, as that part of the average."""
        if self._averages:
            torch._foreach_lerp_(self._averages, self._weights, share)

    def restart(self) -> None:
        """Start from the weights as they are."""
        if self._averages:
            torch._foreach_copy_(self._averages, self._weights)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Return a context in which the model's weights are the averages."""
        if not self._averages:
            yield
            return
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, own)

    def to_broadcast(self) -> list[tuple[str, torch.Tensor]]:
        """Return the averages as Horovod broadcasts them."""
        return [(f"{PREFIX}.{path}", a) for path, a in zip(self._paths, self._averages, strict=True)]
