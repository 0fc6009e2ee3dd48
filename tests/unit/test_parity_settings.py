"""What ``parity`` is told of modules and layers."""

from support.twins import keras

from hvdtrain.tools.parity import tensorflow as of_layers


def test_dropout_layers_of_all_kinds_are_stopped():
    kl = keras.layers

    class Own(kl.Dropout): ...

    names = ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout")
    layers = [Own(0.5), *(getattr(kl, name)(0.5) for name in names)]
    assert of_layers.stop_dropout(keras.Sequential(layers)) == [0.5] * 6
    assert all(layer.rate == 0 for layer in layers)
