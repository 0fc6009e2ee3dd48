"""The frameworks: one backend each, behind one interface."""

from importlib import import_module
from typing import cast

from hvdtrain.backends.base import Backend
from hvdtrain.config import Config

_MODULES = {"torch": "hvdtrain.backends.torch", "tf": "hvdtrain.backends.tensorflow"}


def load_backend(config: Config) -> Backend:
    """Import a framework's backend and start its Horovod.

    Collective. A process has one backend: each framework brings a native library of its own.

    Args:
        config: its ``framework``, ``device`` and ``threads`` are used.

    Raises:
        EnvironmentFault: where the device or the launcher does not fit.
    """
    module = import_module(_MODULES[config.framework])
    return cast(Backend, module.start(config))
