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
