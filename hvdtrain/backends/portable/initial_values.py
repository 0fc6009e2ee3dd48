"""Initial values that depend on nothing but the seed, a parameter's portable name and its shape."""

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.portable.names import is_private
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.data.order import mix

PREFIX = "ema"


def share_of_new(step: int, decay: float) -> float:
    """Return 1 - min(decay, (1 + step) / (10 + step)): the part of the average that weights make up."""
    return 1 - min(decay, (1 + step) / (10 + step))


def has_ema(state: StateArrays) -> bool:
    """Return whether a portable state has a moving average of the weights."""
    return any(_is_ema(name) for name in state)


def without_ema(state: PortableState) -> PortableState:
    """Return a portable state without the moving average: a backend that keeps one starts it anew."""
    return {name: array for name, array in state.items() if not _is_ema(name)}


def ema_as_weights(state: PortableState) -> PortableState:
    """Return a portable state with the moving average in place of the weights, as far as it has one."""
    averages = {name.replace(f"{PREFIX}/", "model/", 1): a for name, a in state.items() if _is_ema(name)}
    return {**without_ema(state), **averages}


def _is_ema(name: str) -> bool:
    """Return whether a portable name, or a framework's private one, belongs to the moving average."""
    _, _, rest = name.partition("/")
    return (rest if is_private(name) else name).startswith(f"{PREFIX}/")


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32] | None:
    """Draw a parameter's initial value, by Keras's defaults, from the seed and its portable name alone."""
    role, limit = name.rsplit("/", 1)[-1], 0.05  # of embeddings
    if role in ("bias", "beta", "moving_mean"):
        return np.zeros(shape, np.float32)
    if role in ("gamma", "moving_variance"):
        return np.ones(shape, np.float32)
    is_recurrent = role == "recurrent_kernel" and len(shape) == 2
    if role == "kernel" and len(shape) >= 2:
        limit = float(np.sqrt(6 / (int(np.prod(shape[:-2])) * (shape[-2] + shape[-1]))))
    elif role != "embeddings" and not is_recurrent:
        return None
    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not
    key = mix(seed, *name.encode())
    random = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
    if not is_recurrent:
        return random.uniform(-limit, limit, shape).astype(np.float32)
    # the nearest matrix whose rows (or columns, whichever are fewer) are orthonormal
    drawn = random.standard_normal(shape)
    wide = drawn if shape[0] <= shape[1] else drawn.T
    q, r = np.linalg.qr(wide.T)
    rows = (q * np.sign(np.diag(r))).T
    return (rows if wide is drawn else rows.T).astype(np.float32)
