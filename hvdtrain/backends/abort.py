"""Giving up collectives from a thread that is not in them."""

import sys
from typing import Any

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import BUILD_COMMAND

_BINDINGS = ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops")
_MOST_CHARACTERS = 400


def abort_collectives(reason: str) -> None:
    """Let the collectives of this process, and an ``hvd.init()`` that is under way, fail within 50 ms.

    Local, and may be called from every thread. The thread that waits gets Horovod's error, or ValueError from
    ``hvd.init()``. Collectives fail until the next ``hvd.init()``. Over MPI nothing happens.

    Args:
        reason: why, in words; it stands in the error.

    Raises:
        HorovodBuildError: If the Horovod that is loaded was built without this.
    """
    for library in _libraries():
        function(library)(reason[:_MOST_CHARACTERS].encode(errors="replace"))


def function(library: Any) -> Any:
    """Return the function of a Horovod library that gives up collectives.

    Args:
        library: as ctypes loaded it.

    Raises:
        HorovodBuildError: If the library was built without it.
    """
    try:
        return library.horovod_abort
    except AttributeError:
        raise HorovodBuildError(
            "the installed Horovod cannot give up collectives, which elastic jobs need",
            f"Build it again:\n  {BUILD_COMMAND} --force",
        ) from None


def _libraries() -> list[Any]:
    """Return the native libraries of the bindings that this process has loaded."""
    modules = [sys.modules.get(name) for name in _BINDINGS]
    bindings = [getattr(module, "_basics", None) for module in modules]
    return [binding.MPI_LIB_CTYPES for binding in bindings if binding is not None]


def check_abort() -> None:
    """Check that collectives can be given up.

    Raises:
        HorovodBuildError: If the Horovod that is loaded was built without it.
    """
    for library in _libraries():
        function(library)
