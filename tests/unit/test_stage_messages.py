"""Tensors of both frameworks as messages between stages."""

import pytest
import torch

from hvdtrain.backends.torch.steps.stage_passes import float_tensors, from_message, to_message

CPU = torch.device("cpu")
TENSORS = {
    "float": torch.randn(2, 3, 4),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "whole": torch.arange(7),
    "boolean": torch.tensor([[True], [False]]),
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "with gaps": torch.randn(4, 6)[:, ::2],
    "expanded": torch.randn(1, 3).expand(2, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    sent = TENSORS[name]
    found = from_message(to_message({"x": (sent, [None, "text"])}), CPU)
    assert found["x"][1] == [None, "text"]
    tensor = found["x"][0]
    assert tensor.dtype == sent.dtype
    assert torch.equal(tensor, sent)
    if sent.is_contiguous(memory_format=torch.preserve_format) or name in ("channels last", "transposed"):
        assert tensor.stride() == sent.stride()


def test_tensors_that_can_have_a_gradient():
    value = {"a": TENSORS["float"], "b": [TENSORS["whole"], (TENSORS["half"], None)]}
    assert [t.dtype for t in float_tensors(value)] == [torch.float32, torch.bfloat16]
