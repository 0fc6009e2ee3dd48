"""What ``parity`` is told of modules and layers."""

from support.twins import keras, torch

from hvdtrain.tools.parity import tensorflow as of_layers
from hvdtrain.tools.parity import torch as of_modules


def test_dropout_layers_of_all_kinds_are_stopped():
    kl = keras.layers

    class Own(kl.Dropout): ...

    names = ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout")
    layers = [Own(0.5), *(getattr(kl, name)(0.5) for name in names)]
    assert of_layers.stop_dropout(keras.Sequential(layers)) == [0.5] * 6
    assert all(layer.rate == 0 for layer in layers)


def test_weight_decay_of_a_tasks_own_optimizer_is_told():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.0}, {"params": weights[1:]}]
    ours = of_modules.optimizer_settings(torch.optim.AdamW(groups, weight_decay=0.01))
    others = of_layers.optimizer_settings(keras.optimizers.Adam())
    assert (ours["class"], ours["weight decay"]) == ("AdamW", 0.01)
    assert (others["class"], others["weight decay"]) == ("Adam", 0.0)
