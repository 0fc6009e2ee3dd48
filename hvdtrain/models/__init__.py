"""Built-in models: the PyTorch model and its Keras twin side by side, with the same portable names.

Every module has ``torch_model`` and ``tf_model`` with the same arguments. Repeated blocks (of a
ResNet, of a transformer) are modules of their own in PyTorch and models of their own in Keras, and
have the attribute ``recompute = True``: what checkpoints activations finds them by it.

The Keras twins are made of Keras's own layers alone, so that their ``.keras`` files load without
hvdtrain.
"""
