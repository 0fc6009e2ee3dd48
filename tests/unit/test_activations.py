"""What a micro-batch takes of memory in PyTorch: known sizes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.torch.activations import ActivationMeter

INPUTS, WIDTH = 64, 1024


def torch_model():
    layers = (
        torch.nn.Linear(INPUTS, WIDTH, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 1, bias=False),
    )
    return torch.nn.Sequential(*layers)


def torch_bytes(samples, forward=None, model=None):
    model = model or torch_model()
    x = torch.ones(samples, INPUTS)
    with (meter := ActivationMeter(model, [x])):
        (forward or model)(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return meter.found()


@pytest.mark.parametrize("samples", [8, 64])
def test_what_a_step_of_pytorch_takes_at_once_is_known(samples):
    """Behind the ReLU: its output, its gradient, and that of its input. No gradient of a parameter counts."""
    hidden = 4 * samples * WIDTH
    assert 3 * hidden <= torch_bytes(samples) < 3.1 * hidden


def test_blocks_that_are_computed_again_take_less():
    blocks = torch.nn.Sequential(*[torch.nn.Sequential(torch_block(), torch_block()) for _ in range(8)])

    def recomputed(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert torch_bytes(64, recomputed, blocks) < 0.75 * torch_bytes(64, None, blocks)


def torch_block():
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, INPUTS), torch.nn.Tanh())
