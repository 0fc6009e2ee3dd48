"""What a Keras model brings for ``model.fit``; ``torch/unused_methods.py`` does so for PyTorch."""

import keras

# those of keras.Model that decide what is computed
_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")


def unused_methods(model: keras.Model) -> list[str]:
    """Return notes on what the model brings that training does not use."""
    notes = []
    if model.compiled:
        notes.append(
            "the settings of the model's compile() (optimizer, loss, metrics) are not used: set optimizer in "
            "the config or tf_optimizer, and loss and metrics in the task"
        )
    own = [name for name in _METHODS if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        notes.append(
            f"{' and '.join(own)} of the model (of model.fit) are not called: loss, metrics and optimizer "
            "are the task's and the config's; tf_loss and tf_optimizer of the task replace them"
        )
    layers = model._flatten_layers(include_self=False)
    if not model._call_has_training_arg and any(layer._call_has_training_arg for layer in layers):
        notes.append(
            f"call() of {type(model).__name__} has no argument training: model.fit would leave its layers, "
            "such as dropout and batch norm, in evaluation; here they train"
        )
    return notes
