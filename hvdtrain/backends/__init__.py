"""The frameworks: one backend each, behind one interface."""

from importlib import import_module
from typing import cast

from hvdtrain.backends.base import Backend
from hvdtrain.backends.choice import quick_imports
from hvdtrain.config import Config
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import BUILD_COMMAND
from hvdtrain.host.frameworks import FRAMEWORKS, require_triton_before_tensorflow
from hvdtrain.workers.activity import ACTIVITY


def load_backend(config: Config, membership: Membership | None = None) -> Backend:
    """Import a framework's backend and start its Horovod.

    Collective. A process has one backend: each framework brings a native library of its own.
    """
    framework = FRAMEWORKS[config.framework]
    if framework.flag == "torch":
        require_triton_before_tensorflow()
    try:
        with ACTIVITY.during(f"importing {framework.title}"), quick_imports(framework.postponed):
            module = import_module(framework.module)
    except ImportError as error:
        raise HorovodBuildError(
            f"{framework.title} or Horovod's extension for it cannot be loaded: {error}",
            f"If it is Horovod, build it again:\n  {BUILD_COMMAND} --force",
        ) from error
    with ACTIVITY.during("starting Horovod, which waits for all workers"):
        return cast(Backend, module.start(config, membership))
