"""Build Horovod 0.28.1 for the installed frameworks, and read what is installed.

Nothing here imports a framework or Horovod. Modules that only a build needs are loaded on first use,
so that the start of a job pays for `require_horovod` alone. See docs/horovod.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdtrain.horovod_build.installed import InstalledBuild, check_patches, installed_build, require_horovod

if TYPE_CHECKING:
    from hvdtrain.horovod_build.building import build_horovod
    from hvdtrain.horovod_build.plan import BuildRequest

__all__ = [
    "BuildRequest",
    "InstalledBuild",
    "build_horovod",
    "check_patches",
    "installed_build",
    "require_horovod",
]

_HOMES = {"BuildRequest": "plan", "build_horovod": "building"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
