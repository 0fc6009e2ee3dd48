"""The frameworks: one backend each, behind one interface."""

import atexit
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from typing import Any, cast

from hvdtrain.backends.base import Backend
from hvdtrain.config import Config
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import BUILD_COMMAND
from hvdtrain.host.frameworks import FRAMEWORKS, require_triton_before_tensorflow
from hvdtrain.workers.activity import ACTIVITY

# what Keras imports and training does not use: scikit-learn and most of SciPy
_POSTPONED = ("keras.wrappers",)


def load_backend(config: Config, membership: Membership | None = None) -> Backend:
    """Import a framework's backend and start its Horovod."""
    framework = FRAMEWORKS[config.framework]
    if framework.flag == "torch":
        require_triton_before_tensorflow()
    try:
        with ACTIVITY.during(f"importing {framework.title}"), quick_imports():
            module = import_module(framework.module)
    except ImportError as error:
        raise HorovodBuildError(
            f"{framework.title} or Horovod's extension for it cannot be loaded: {error}",
            f"If it is Horovod, build it again:\n  {BUILD_COMMAND} --force",
        ) from error
    with ACTIVITY.during("starting Horovod, which waits for all workers"):
        return cast(Backend, module.start(config, membership))


@contextmanager
def quick_imports() -> Iterator[None]:
    """Return a context in which imports take less time: without collections, which find hardly any garbage.

    In a process of the command line, later collections leave out what is there at the end of the imports.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    sys.meta_path.insert(0, _Postponing)
    try:
        yield
    finally:
        sys.meta_path.remove(_Postponing)
        program = Path(sys.argv[0])
        is_command = program.name == "hvdtrain" or program.parts[-2:] == ("hvdtrain", "__main__.py")
        if len(sys.modules) > modules and is_command:
            gc.freeze()
            atexit.register(_free_triton)
        if collects:
            gc.enable()


def _free_triton() -> None:
    """Free objects of Triton at the end of this process: since 3.9 it reports each one that is left."""
    version = getattr(sys.modules.get("triton"), "__version__", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) >= (3, 9):
        gc.unfreeze()  # not without need: looking through all objects takes a second


class _Postponing:
    """Finds the modules that are postponed, as Python does; nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that is postponed, with a loader that waits for its first use."""
        if name not in _POSTPONED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec
