"""Built-in models: the PyTorch model and its Keras twin side by side, with the same portable names.

Every module has ``torch_model`` and ``tf_model`` with the same arguments. Repeated blocks (of a
ResNet or a transformer) are modules of their own in PyTorch and models of their own in Keras. They
have the attribute ``recompute = True``, which marks them for activation checkpointing.

The Keras twins consist of Keras's own layers only, so their ``.keras`` files can be loaded without
hvdtrain.
"""
