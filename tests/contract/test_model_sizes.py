"""Models of published sizes: their counts of parameters. Their Keras twins are in test_model_twins.py."""

import pytest
from support.twins import torch

from hvdtrain.models import bert, gpt, mlp, resnet

IMAGENET = {"image_shape": (224, 224, 3), "classes": 1000, "stem": "imagenet"}
GPT2_SMALL = {"vocabulary": 50257, "context": 1024, "layers": 12, "heads": 12, "channels": 768}
BERT_BASE = {"vocabulary": 30522, "context": 512, "layers": 12, "heads": 12, "channels": 768}
BERT = 109_482_240 - 2 * 768  # with its pooler, without its token types

COUNTS = [
    (mlp, {"input_shape": (28, 28, 1), "classes": 10}, 269_322),
    (resnet, IMAGENET | {"depth": 18}, 11_689_512),
    (resnet, IMAGENET | {"depth": 34}, 21_797_672),
    (resnet, IMAGENET | {"depth": 50}, 25_557_032),
    (gpt, GPT2_SMALL, 124_439_808),
    (bert, BERT_BASE | {"classes": 2}, BERT + 2 * 768 + 2),
]


@pytest.mark.parametrize(("module", "arguments", "count"), COUNTS)
def test_parameters_are_as_many_as_published(module, arguments, count):
    with torch.device("meta"):
        model = module.torch_model(**arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
