"""The frameworks that can train: one row each."""

import contextlib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import EnvironmentFault


@dataclass(frozen=True)
class Framework:
    """A framework that can train."""

    flag: str  # its name in options, such as "torch"; also the prefix of the task's methods for it
    title: str  # its name for people
    module: str  # the module of its backend
    horovod: str = ""  # the module of Horovod's binding; empty if the backend needs none
    # modules that the framework imports and training does not use, loaded at their first use
    postponed: tuple[str, ...] = ()

    @property
    def model_method(self) -> str:
        """The task's method that makes the model."""
        return f"{self.flag}_model"

    @property
    def loss_method(self) -> str:
        """The task's optional method in place of the model call, loss and metrics."""
        return f"{self.flag}_loss"

    @property
    def optimizer_method(self) -> str:
        """The task's optional method that makes an optimizer."""
        return f"{self.flag}_optimizer"

    @property
    def optimizers_method(self) -> str:
        """The task's optional method that makes several optimizers, by name."""
        return f"{self.flag}_optimizers"

    @property
    def step_method(self) -> str:
        """The task's optional method in place of a training step."""
        return f"{self.flag}_step"

    @property
    def blocks_method(self) -> str:
        """The task's optional method that gives the blocks of a split model."""
        return f"{self.flag}_blocks"


FRAMEWORKS: dict[str, Framework] = {
    row.flag: row
    for row in (
        Framework("torch", "PyTorch", "hvdtrain.backends.torch.backend", "horovod.torch"),
        Framework(
            "tf",
            "TensorFlow",
            "hvdtrain.backends.tensorflow.backend",
            "horovod.tensorflow",
            postponed=("keras.wrappers",),  # it imports scikit-learn and most of SciPy
        ),
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
