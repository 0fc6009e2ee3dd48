"""Which parameters of a PyTorch model are trained; ``tensorflow/trained_set.py`` does the same for Keras."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, cast

import torch

from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.trained_set import Change


class TrainedSet:
    """The parameters that require a gradient, and the modules that hold them, as they were last looked at.

    Args:
        model: the model.
        tensors: its tensors.
    """

    def __init__(self, model: torch.nn.Module, tensors: ModelState) -> None:
        self._model, self._tensors = model, tensors
        self._entries = [e for e in tensors.entries if isinstance(e.tensor, torch.nn.Parameter)]
        self._parameters = [entry.tensor for entry in self._entries]
        self._trained = [p.requires_grad for p in self._parameters]
        self._places = list(self._find_places())
        self._as_built = list(self._trained)

    def change(self) -> Change:
        """Return the names of what has changed since ``accept`` was called last. Local: no collective."""
        now = [p.requires_grad for p in self._parameters]
        thawed: list[str] = []
        frozen: list[str] = []
        if now != self._trained:
            for entry, is_trained, was_trained in zip(self._entries, now, self._trained, strict=True):
                if is_trained != was_trained:
                    (thawed if is_trained else frozen).append(f"model/{entry.path}")
        return thawed, frozen, self._replaced()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Return a context without the change: modules hold and train what they did when last looked at."""
        now = [p.requires_grad for p in self._parameters], [dict(held) for _, held, _ in self._places]
        self._put(self._trained, [before for *_, before in self._places])
        try:
            yield
        finally:
            self._put(*now)

    def look(self) -> None:
        """Take the flags as they are: a step of the task's own may set them."""
        self._trained = [p.requires_grad for p in self._parameters]

    def accept(self) -> None:
        """Take the parameters that require a gradient now as those that are trained."""
        self.look()
        self.optimize(())

    def optimize(self, others: Collection[int]) -> None:
        """Take some parameters, by identity, as trained ones as well: those that an optimizer knows."""
        chosen = {id(p) for p in self._parameters if p.requires_grad} | set(others)
        self._tensors.train(chosen)

    def state(self, **chosen: Collection[int]) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps; None while all is as the model was built.

        Args:
            chosen: identities of the parameters that an optimizer knows, or for which it keeps something.
        """
        if self._trained == self._as_built:
            return None
        trained = {id(p) for p, is_trained in zip(self._parameters, self._trained, strict=True) if is_trained}
        return {
            key: [entry.path for entry in self._entries if id(entry.tensor) in ids]
            for key, ids in {"trained": trained, **chosen}.items()
        }

    def follow(self, state: dict[str, list[str]]) -> None:
        """Take what a checkpoint keeps."""
        trained = self.ids_of(state["trained"])
        for parameter in self._parameters:
            parameter.requires_grad_(id(parameter) in trained)
        self.optimize(self.ids_of(state["optimized"]))

    def ids_of(self, names: Collection[str]) -> set[int]:
        """Return the identities of the parameters of these names."""
        return {id(entry.tensor) for entry in self._entries if entry.path in set(names)}

    def _put(self, trained: Sequence[bool], contents: Sequence[Mapping[str, Any]]) -> None:
        for parameter, is_trained in zip(self._parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        for (_, held, _), content in zip(self._places, contents, strict=True):
            held.clear()
            held.update(content)

    def _find_places(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Return the mappings by which modules hold modules and parameters, as they are and copied."""
        for path, module in self._model.named_modules():
            for held in (module._modules, cast(dict[str, Any], module._parameters)):
                if held:
                    yield path, held, dict(held)

    def _replaced(self) -> list[str]:
        found = []
        for path, held, before in self._places:
            if len(held) == len(before) and all(map(is_, held.values(), before.values())):
                continue
            for name in before.keys() | held.keys():
                pair = held.get(name), before.get(name)
                if pair[0] is not pair[1] and any(map(_has_parameters, pair)):
                    found.append(f"{path}.{name}".lstrip("."))
        return sorted(found)


def _has_parameters(held: Any) -> bool:
    return isinstance(held, torch.Tensor) or (held is not None and any(True for _ in held.parameters()))
