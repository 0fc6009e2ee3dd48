"""Built-in models: PyTorch's and its Keras twin agree in names, outputs and gradients; published sizes."""

import itertools
from functools import cache

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, assert_same, keras, model_part, torch

from hvdtrain.errors import TaskError
from hvdtrain.models import bert, choose, convnet, gpt, mlp, resnet

IMAGES = RANDOM.standard_normal((4, 16, 16, 3)).astype(np.float32)
TOKENS = RANDOM.randint(1, 50, (4, 12))
PADDED = TOKENS * (np.arange(12) < [[12], [7], [1], [0]])
SIZES = {"vocabulary": 50, "context": 16, "layers": 2, "heads": 4, "channels": 32, "dropout": 0.0}

# module, its arguments, inputs, number of its blocks whose activations may be computed again
MODELS = {
    "mlp": (mlp, {"input_shape": (16, 16, 3), "classes": 5, "hidden": (8, 9)}, IMAGES, 0),
    "convnet": (convnet, {"image_shape": (16, 16, 3), "classes": 5}, IMAGES, 0),
    "resnet18": (resnet, {"image_shape": (16, 16, 3), "classes": 5}, IMAGES, 8),
    "resnet50-imagenet": (
        resnet,
        {"image_shape": (64, 64, 3), "classes": 5, "depth": 50, "stem": "imagenet", "activation": "silu"},
        RANDOM.standard_normal((4, 64, 64, 3)).astype(np.float32),
        16,
    ),
    "gpt": (gpt, SIZES, TOKENS, 2),
    "bert": (bert, SIZES | {"classes": 5}, PADDED, 2),
}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def made(name):
    """Give both sides of a model, and weights for them: made once."""
    module, arguments, _, _ = MODELS[name]
    keras.utils.set_random_seed(3)
    left, right = TorchSide(module.torch_model(**arguments)), KerasSide(module.tf_model(**arguments))
    return left, right, {key: like_trained(key, value) for key, value in model_part(right.read()).items()}


def like_trained(key, value):
    """Give kernels their initial value, so that activations keep their size, and all others a new one."""
    if key.endswith(("kernel", "embeddings")):
        return value
    return value + 0.1 * np.abs(RANDOM.standard_normal(value.shape)).astype(value.dtype)


def load(side, weights):
    others = {key: value for key, value in side.read().items() if not key.startswith("model/")}
    side.write(others | weights)


def pair(name):
    """Give both sides of a model, with the same weights."""
    left, right, weights = made(name)
    load(left, weights)
    load(right, weights)
    return left, right


@every_model
def test_states_go_from_either_framework_to_the_other_and_back(name):
    left, right, weights = made(name)
    for side, other in ((left, right), (right, left)):
        load(side, weights)
        other.randomize()
        load(other, model_part(side.read()))
        side.randomize()
        load(side, model_part(other.read()))
        assert_same(model_part(side.read()), weights)


@every_model
def test_outputs_agree(name):
    (left, right), inputs = pair(name), MODELS[name][2]
    found, expected = left(inputs), right(inputs)
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0.01  # outputs that agree because all are zero would show nothing
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1, np.abs(expected).max()), rtol=0)


# a deep ResNet with ReLU is compared in 64 bits, below
@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet18"])
def test_one_steps_outputs_gradients_and_moving_statistics_agree(name):
    (left, right), inputs = pair(name), MODELS[name][2]
    expected_outputs, expected = keras_step(right, inputs)
    outputs, found = torch_step(left, inputs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=1e-4, rtol=1e-4)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        difference = np.linalg.norm(found[key] - value)
        assert difference <= 1e-3 * np.linalg.norm(value) + 1e-7, key


@pytest.fixture
def of_64_bits():
    """Let both frameworks make models of 64-bit numbers."""
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)


@pytest.mark.usefixtures("of_64_bits")
@pytest.mark.parametrize(("depth", "stem", "size"), [(18, "cifar", 16), (50, "imagenet", 32)])
def test_gradients_of_a_deep_resnet_with_relu_agree(depth, stem, size):
    """In 64 bits: a ReLU that rounding switches changes a 32-bit gradient by some percent."""
    images = RANDOM.standard_normal((4, size, size, 3))
    arguments = {"image_shape": (size, size, 3), "classes": 5, "depth": depth, "stem": stem}
    keras.utils.set_random_seed(3)
    left, right = TorchSide(resnet.torch_model(**arguments)), KerasSide(resnet.tf_model(**arguments))
    load(left, model_part(right.read()))
    expected_outputs, expected = keras_step(right, images)
    outputs, found = torch_step(left, images)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-7)
    for key, value in expected.items():
        assert np.linalg.norm(found[key] - value) <= 1e-6 * np.linalg.norm(value), key


def torch_step(side, inputs):
    """Give the outputs in training, and by portable names the gradients and the moving statistics."""
    module = side.module.train()
    outputs = module(torch.from_numpy(inputs))
    (outputs * weights_of(outputs.shape, torch.from_numpy)).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
            parameter.grad = None
    return outputs.detach().numpy(), model_part(side.read())


def keras_step(side, inputs):
    import tensorflow as tf

    variables = side.model.trainable_variables
    with tf.GradientTape() as tape:
        outputs = side.model(inputs, training=True)
        loss = tf.reduce_sum(outputs * weights_of(outputs.shape, tf.constant))
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign(tf.convert_to_tensor(gradient))
    return np.asarray(outputs), model_part(side.read())


def weights_of(shape, convert):
    """Give fixed weights of outputs, so that their sum is a loss with all kinds of gradients."""
    weights = np.random.RandomState(1).standard_normal(tuple(shape))
    return convert(weights.astype(keras.config.floatx()))


@every_model
def test_blocks_to_compute_again_are_marked(name):
    left, right, _ = made(name)
    blocks = MODELS[name][3]
    assert sum(getattr(module, "recompute", False) for module in left.module.modules()) == blocks
    layers = right.model._flatten_layers()
    assert sum(getattr(layer, "recompute", False) for layer in layers) == blocks


@pytest.mark.parametrize("name", ["resnet18", "bert", "gpt"])
def test_a_keras_file_loads_without_hvdtrain(name, tmp_path):
    _, right = pair(name)
    right.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    inputs = MODELS[name][2]
    np.testing.assert_array_equal(np.asarray(loaded(inputs)), right(inputs))
    assert "hvdtrain" not in str(loaded.get_config())


def test_padding_changes_nothing_that_is_read():
    for side in pair("bert"):
        np.testing.assert_allclose(side(PADDED[1:2]), side(PADDED[1:2, :7]), atol=1e-6)


def test_the_decoder_sees_no_token_to_come():
    changed = TOKENS.copy()
    changed[:, 6:] = 1
    for side in pair("gpt"):
        np.testing.assert_allclose(side(changed)[:, :6], side(TOKENS)[:, :6], atol=1e-6)
        assert np.abs(side(changed)[:, 6:] - side(TOKENS)[:, 6:]).max() > 1e-3


# one framework after the other: that their models are the same is proved above
@pytest.mark.parametrize(("framework", "name"), list(zip(itertools.cycle(["torch", "tf"]), choose.NAMES)))
def test_models_for_images_go_by_name(framework, name):
    model = choose.image_model(framework, name, (8, 8, 1), 3)
    outputs = model(torch.zeros(2, 8, 8, 1)) if framework == "torch" else model(np.zeros((2, 8, 8, 1)))
    assert tuple(outputs.shape) == (2, 3)


def test_resnets_have_torchvisions_names():
    names = resnet.torch_model((8, 8, 3), 5).state_dict().keys()
    assert len(names) == 122
    assert {"conv1.weight", "layer1.0.bn2.running_var", "layer2.0.downsample.1.weight", "fc.bias"} <= names


def test_larger_images_get_the_stem_that_shrinks_them():
    model = choose.image_model("torch", "resnet18", (64, 96, 3), 3)
    assert model.conv1.kernel_size == (7, 7)
    assert choose.image_model("torch", "resnet18", (63, 96, 3), 3).conv1.kernel_size == (3, 3)


def test_models_that_cannot_be_are_refused():
    with pytest.raises(TaskError, match=r"no model 'vgg' for images(.|\n)*resnet50"):
        choose.image_model("tf", "vgg", (8, 8, 1), 3)
    with pytest.raises(TaskError, match="must be even; these are 7x8"):
        choose.image_model("torch", "convnet", (7, 8, 1), 3)
    with pytest.raises(TaskError, match="no ResNet of depth 19, stem"):
        resnet.tf_model((8, 8, 1), 3, depth=19)
    with pytest.raises(TaskError, match="32 channels cannot be divided among 5 attention heads"):
        gpt.torch_model(**SIZES | {"heads": 5})


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
