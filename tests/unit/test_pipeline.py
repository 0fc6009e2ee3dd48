"""Split models: where they are cut, the order of passes, the blocks of Keras models, and messages."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.pipeline.checks import blocks_of
from hvdtrain.backends.pipeline.pipeline import bubble, cut, first_blocks, one_forward_one_backward
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.steps.stage_passes import StageModel, layers_of
from hvdtrain.backends.torch.steps.stage_passes import from_message, to_message
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.models import bert, convnet, gpt, mlp, resnet
from hvdtrain.workers.agreement import WorkerPlace


def test_the_largest_stage_is_as_small_as_any_division_makes_it():
    def largest(sizes, firsts):
        return max(map(sum, np.split(sizes, firsts[1:])))

    random = np.random.RandomState(0)
    for stages in (1, 2, 3, 4) * 20:
        sizes = random.randint(0, 99, random.randint(stages, 8)).tolist()
        firsts = cut(sizes, stages)
        assert firsts[0] == 0
        assert len(set(firsts)) == stages
        every = [[0, *rest] for rest in itertools.combinations(range(1, len(sizes)), stages - 1)]
        assert largest(sizes, firsts) == min(largest(sizes, one) for one in every)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(TaskError, match="the model has 2 blocks, which cannot be divided into 3 stages"):
        first_blocks([1, 1], 3, None)
    for cuts in ([0], [5], [3, 2], [1, 1], [], [1, 2, 3]):
        with pytest.raises(ConfigError, match="does not divide 5 blocks into 3 stages"):
            first_blocks([1] * 5, 3, cuts)
    assert first_blocks([1] * 5, 3, [1, 4]) == [0, 1, 4]
    model = convnet.tf_model((8, 8, 1), 10)
    with pytest.raises(TaskError, match=r"a Functional, cannot be divided into stages"):
        blocks_of(SimpleNamespace(), model, "tf", layers_of(model))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 8), (3, 4), (5, 2)])
def test_a_pipeline_ends_and_waits_as_its_formula_says(stages, micro_batches):
    """Every pass takes a unit of time and begins when what it needs is there."""
    left = {stage: list(one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)}
    done, units = set(), 0
    while any(left.values()):
        begun = []
        for stage, passes in left.items():
            if not passes:
                continue
            kind, place = passes[0]
            source = stage + (-1 if kind == "forward" else 1)
            if source not in range(stages) or (source, kind, place) in done:
                begun.append((stage, *passes.pop(0)))
        assert begun, "the stages wait for one another"
        done |= set(begun)
        units += 1
    assert units == 2 * (micro_batches + stages - 1)
    assert 1 - 2 * micro_batches / units == pytest.approx(bubble(stages, micro_batches))


def test_places_of_workers():
    workers = SimpleNamespace(rank=4, size=6)
    layout = WorkerPlace(workers, 3)
    assert (layout.replicas, layout.replica, layout.stage) == (2, 1, 1)
    assert (layout.is_first_stage, layout.is_last_stage) == (False, False)
    with pytest.raises(ConfigError, match="the job has 6 workers"):
        WorkerPlace(workers, 4)


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (mlp, ((8, 8, 1), 10)),
        (convnet, ((8, 8, 1), 10)),
        (resnet, ((32, 32, 3), 10, 18, "imagenet")),
        (gpt, (17, 16, 2, 2, 16)),
        (bert, (17, 16, 2, 2, 16, 10)),
    ],
)
def test_blocks_of_the_built_in_models_of_keras_compute_what_they_do(module, sizes):
    model = module.tf_model(*sizes)
    blocks = module.tf_blocks(model)
    shape, random = model.inputs[0].shape[1:], np.random.RandomState(0)
    inputs = random.randint(0, 17, (4, 16)) if shape == (None,) else random.rand(4, *shape)
    inputs = tf.constant(inputs, model.inputs[0].dtype)
    with phase_of_layers(training=False):
        np.testing.assert_array_equal(StageModel(blocks).call(inputs), model(inputs, training=False))
    assert {id(v) for v in model.variables} == {id(v) for v in StageModel(blocks).variables}
    assert len(blocks) > 2


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


def test_tensors_arrive_as_they_were():
    found = from_message(to_message({"x": (TENSORS, [None, "text"])}), torch.device("cpu"))
    tensors, rest = found["x"]
    assert rest == [None, "text"]
    for name, sent in TENSORS.items():
        assert tensors[name].dtype == sent.dtype
        assert torch.equal(tensors[name], sent)
        if name not in ("with gaps", "expanded"):
            assert tensors[name].stride() == sent.stride()
