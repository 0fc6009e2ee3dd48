"""PyTorch behind the Backend interface, over ``horovod.torch``."""
