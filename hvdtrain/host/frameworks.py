"""The frameworks that can train: one row each."""

import contextlib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import EnvironmentFault


@dataclass(frozen=True)
class Framework:
    """A framework that can train."""

    flag: str  # its name in options, such as "torch"; also the prefix of the task's methods for it
    title: str  # its name for people
    module: str  # the module of its backend
    horovod: str = ""  # the module of Horovod's binding; empty if the backend needs none
    # the task's methods for it: the model, what replaces model call, loss and metrics, the optimizer, several
    # optimizers by name, what replaces a training step, and the blocks of a split model
    model_method: str = field(init=False)
    loss_method: str = field(init=False)
    optimizer_method: str = field(init=False)
    optimizers_method: str = field(init=False)
    step_method: str = field(init=False)
    blocks_method: str = field(init=False)

    def __post_init__(self) -> None:
        for kind in ("model", "loss", "optimizer", "optimizers", "step", "blocks"):
            object.__setattr__(self, f"{kind}_method", f"{self.flag}_{kind}")


FRAMEWORKS: dict[str, Framework] = {
    row.flag: row
    for row in (
        Framework("torch", "PyTorch", "hvdtrain.backends.torch.backend", "horovod.torch"),
        Framework("tf", "TensorFlow", "hvdtrain.backends.tensorflow.backend", "horovod.tensorflow"),
    )
}


def load_triton() -> None:
    """Load Triton, which PyTorch's builds with CUDA bring, before TensorFlow.

    Both contain LLVM. TensorFlow since 2.20 offers its own to all libraries of the process. Triton since 3.7
    ends the process with SIGSEGV if it is loaded later (tensorflow/tensorflow#124205), as PyTorch does
    with its first optimizer. Does nothing without Triton, or if TensorFlow is loaded already.
    """
    if "tensorflow" not in sys.modules and _triton_version():
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")


def require_triton_before_tensorflow() -> None:
    """Raise an error if PyTorch would end this process, because TensorFlow was loaded before Triton."""
    load_triton()
    offers_llvm = "tensorflow.python.pywrap_dlopen_global_flags" in sys.modules
    if offers_llvm and "triton" not in sys.modules and _triton_version() >= (3, 7):
        raise EnvironmentFault(
            "This process has loaded TensorFlow, and PyTorch's Triton cannot be loaded after it: the process "
            "would end with SIGSEGV (tensorflow/tensorflow#124205).",
            "Put `import triton` before the first import of tensorflow or keras.",
        )


def _triton_version() -> tuple[int, ...]:
    """Return Triton's major and minor version, read from its file; empty if it is not installed."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ()
    text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()
