"""The model that a task makes."""

from typing import Any

import torch

from hvdtrain.errors import TaskError


def make_model(task: Any) -> torch.nn.Module:
    """Return a task's model, as the task makes it.

    Raises:
        TaskError: If it is none.
    """
    model = task.torch_model()
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"torch_model() must give a torch.nn.Module, found {type(model).__name__}")
    return model


def check_parts(model: torch.nn.Module) -> list[str]:
    """Return notes on what several workers compute otherwise, since each has a part of the batch.

    Raises:
        TaskError: If the model changes weights by its part, so that those of the workers would differ.
    """
    counting = []
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if layer.max_norm is not None:
            raise TaskError(
                f"the embedding {name!r} has max_norm, which scales the vectors that are looked up in place; "
                "each worker looks up those of its own samples, so the weights of the workers would differ",
                "Leave max_norm out and scale the vectors in the forward pass, such as "
                "functional.embedding(x, torch.renorm(weight, 2, 0, max_norm)); or use one worker.",
            )
        if layer.scale_grad_by_freq:
            counting.append(name)
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    counts = (
        f"{', '.join(counting)}: scale_grad_by_freq counts how often an id occurs in each worker's samples, "
        "not in those of all workers, so the curve depends on the number of workers"
    )
    hooks = (
        f"{', '.join(hooked)}: hooks of the model are given each worker's part of the gradient, before the "
        "workers' parts are added up; if they are not linear, such as clipping, the curve depends on the "
        "number of workers (--clip-norm clips the sum)"
    )
    return [note for note, found in ((counts, counting), (hooks, hooked)) if found]
