"""``--compile`` in PyTorch: torch.compile. ``tensorflow/compile.py`` does the same for Keras."""

import os
import shlex
import shutil
from typing import Any

import torch

from hvdtrain.errors import EnvironmentFault

_REMEDY = "Install a C++ compiler and Python's headers (Debian: g++, python3-dev), or leave --compile out."
# dropout draws what it draws without a compiler, so the loss curve stays the same; and no pool of
# processes compiles beside the workers, which have the host's cores already
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


def check_compiler(device: torch.device, host: str) -> None:
    """Check that this worker can compile, by compiling something small. Local: no collective.

    Raises:
        EnvironmentFault: with the compiler's own reason.
    """
    command = os.environ.get("CXX", "g++")  # what PyTorch calls
    if device.type == "cpu" and shutil.which(shlex.split(command)[0]) is None:
        raise EnvironmentFault(f"--compile: {host} has no C++ compiler {command} for torch.compile", _REMEDY)
    try:
        torch.compile(lambda x: x + 1, options=_OPTIONS)(torch.zeros(2, device=device))
    except Exception as error:  # the compiler's, the linker's, the cache's, ...
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = next((line for line in lines if "error:" in line), lines[0] if lines else "")
        raise EnvironmentFault(
            f"--compile: torch.compile fails on {host}: {type(error).__name__}: {message[:300]}", _REMEDY
        ) from None


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, whose calls are compiled when they first happen, anew for other shapes.

    In place, so that its state keeps its names; modules below it that a task calls itself are not
    compiled.
    """
    model.compile(options=_OPTIONS)
    return model
