"""The moving average of the weights: its decay at each step, and its place in the portable state."""

from hvdtrain.backends.base import PortableState, StateArrays
from hvdtrain.backends.portable.names import is_private

PREFIX = "ema"


def share_of_new(step: int, decay: float) -> float:
    """Return the part of the average that a step's weights make up.

    ::

        decay of step t = min(decay, (1 + t) / (10 + t))
        average = average * decay of step t + weights * (1 - decay of step t)

    So what training starts from is soon forgotten. It is a function of the step alone: nothing is
    carried from run to run, and all workers agree.

    Source: tf.train.ExponentialMovingAverage with num_updates.

    Args:
        step: steps done, this one included.
        decay: of later steps.
    """
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
