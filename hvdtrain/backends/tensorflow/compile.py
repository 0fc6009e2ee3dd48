"""``--compile`` in TensorFlow: XLA. ``torch/compile.py`` does the same for PyTorch."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.errors import EnvironmentFault


def check_compiler(host: str) -> None:
    """Check that this worker can compile, by compiling something small. Local: no collective.

    Raises:
        EnvironmentFault: with XLA's own reason.
    """
    try:
        compiled(lambda x: x + 1)(tf.zeros(2))
    except (tf.errors.OpError, ValueError) as error:
        message = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(
            f"--compile: XLA fails on {host}: {message[:300]}",
            "Install a TensorFlow that was built with XLA, or leave --compile out.",
        ) from None


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step as XLA compiles it, anew for each set of shapes.

    It must hold no collective: Horovod is built without its operations for XLA.
    """
    function: Callable[..., Any] = tf.function(step, autograph=False, jit_compile=True)
    return function
