"""Rules of both frameworks: the loss scale of fp16, lars, which parameters are matrices, repeated blocks."""

from typing import Any

from hvdtrain.backends.workers import HorovodWorkers, Sized
from hvdtrain.errors import EnvironmentFault, TaskError

# of the dynamic loss scale, as torch.amp.GradScaler has them
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow, after which the scale doubles
LOWEST_SCALE = 1.0


def check_precision(precision: str, on_gpu: bool, host: str) -> None:
    """Check that this worker's device computes in a precision."""
    if precision == "fp16" and not on_gpu:
        raise EnvironmentFault(
            f"--precision fp16 needs a GPU, and on {host} the CPU computes",
            "Use --precision bf16, which computes on CPUs too, or fp32.",
        )


class LossScaleBase:
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after.

    If gradients overflow, the step is skipped and the scale halves; after many steps without an
    overflow it doubles. What is checked are the reduced gradients, which all workers have in common, so
    all decide alike without another collective.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), with the numbers of torch.amp.GradScaler.

    Attributes:
        is_exhausted: whether the last step's gradients overflowed at the lowest scale: it is no longer
            fp16 that is to blame.
    """

    value: Any
    skipped: Any
    is_exhausted: Any

    def __init__(self, workers: Sized, growth_interval: int) -> None:
        self._workers = workers
        self._growth_interval = growth_interval

    @property
    def factor(self) -> Any:
        """What gradients are multiplied by: the scale, times the number of workers.

        A worker's gradient is its part of the mean over all of them, and gets smaller as they get more.
        """
        return self.value * self._workers.size


# keeps lars from dividing by 0; too small to change what it does otherwise
LARS_EPSILON = 1e-8
LARS_TRUST = 0.001  # norm of an update relative to the parameter's, at learning rate 1

_NEVER = ("bias", "beta", "gamma")


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is no bias and belongs to no norm.

    lars and lamb scale its update by its norm; without ``decay_norms_and_biases``, others do not decay.

    Biases and what norms multiply by and add are left out, as is usual: their own norm says nothing of
    how far they may move. Names and shapes are the portable ones, so both frameworks agree.
    """
    return len(shape) > 1 and path.rpartition("/")[2] not in _NEVER


MARK = "recompute"  # the attribute of a block, or of its class


def no_blocks(method: str, base: str, otherwise: str) -> TaskError:
    """Return the error about a model without blocks."""
    return TaskError(
        f"checkpoint_activations: {method} gave a model without repeated blocks",
        f"Give the class of the block, a {base}, the attribute {MARK} = True, {otherwise}; "
        "or leave --checkpoint-activations out.",
    )


def check_gpus(cards: int, library: str, build: str, workers: HorovodWorkers) -> None:
    """Check that this worker has a GPU of its own."""
    if not cards:
        raise EnvironmentFault(
            f"--device gpu: {library} sees no GPU on {workers.host}",
            f"Use --device cpu, or install a driver and {build}.",
        )
    if workers.local_rank >= cards:
        raise EnvironmentFault(
            f"{workers.host} has {cards} GPUs for {workers.local_size} workers; each worker needs one",
            f"Start at most {cards} workers on this host, or use --device cpu.",
        )
