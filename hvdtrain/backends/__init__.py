"""The frameworks: one backend each, behind one interface."""

from importlib import import_module
from typing import cast

from hvdtrain.backends.base import Backend
from hvdtrain.config import Config
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.frameworks import TITLES
from hvdtrain.horovod_build.installed import BUILD_COMMAND

_MODULES = {"torch": "hvdtrain.backends.torch", "tf": "hvdtrain.backends.tensorflow"}


def load_backend(config: Config) -> Backend:
    """Import a framework's backend and start its Horovod.

    Collective. A process has one backend: each framework brings a native library of its own.

    Args:
        config: its ``framework``, ``device`` and ``threads`` are used.

    Raises:
        EnvironmentFault: where the device or the launcher does not fit, or a library is missing.
    """
    try:
        module = import_module(_MODULES[config.framework])
    except ImportError as error:
        raise HorovodBuildError(
            f"{TITLES[config.framework]} or Horovod's extension for it cannot be loaded: {error}",
            f"If it is Horovod, build it again:\n  {BUILD_COMMAND} --force",
        ) from error
    return cast(Backend, module.start(config))
