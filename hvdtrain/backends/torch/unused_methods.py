"""What a PyTorch model brings for another trainer; ``tensorflow/unused_methods.py`` does so for Keras."""

import torch

# those of a LightningModule that decide what is computed
_METHODS = ("training_step", "validation_step", "configure_optimizers")


def unused_methods(model: torch.nn.Module) -> list[str]:
    """Return notes on what the model brings that training does not use."""
    found = [name for name in _METHODS if callable(getattr(model, name, None))]
    if not found:
        return []
    return [
        f"{' and '.join(found)} of the model (of PyTorch Lightning) are not called: loss, metrics and "
        "optimizer are the task's and the config's; torch_loss and torch_optimizer of the task replace them"
    ]
