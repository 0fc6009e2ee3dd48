"""Rules of both frameworks: the loss scale of fp16, lars, which parameters are matrices, repeated blocks."""

from collections.abc import Callable, Iterable, Iterator
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
    overflow it doubles. What is checked are the reduced gradients, which all workers have in common.
    Source: Micikevicius et al. 2018 (arXiv:1710.03740).
    """

    value: Any
    is_exhausted: Any  # whether the last step's gradients overflowed at the lowest scale

    def __init__(
        self, workers: Sized, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._workers, self._growth_interval = workers, growth_interval
        self.value, self.is_exhausted = initial, False
        self._steps_since_change: Any = 0

    @property
    def factor(self) -> Any:
        """What gradients are multiplied by: the scale, times the workers of whose mean each has a part."""
        return self.value * self._workers.size


# keeps lars from dividing by 0; too small to change what it does otherwise
LARS_EPSILON = 1e-8
LARS_TRUST = 0.001  # norm of an update relative to the parameter's, at learning rate 1

_NEVER = ("bias", "beta", "gamma")


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is no bias and belongs to no norm, by its portable name and shape."""
    return len(shape) > 1 and path.rpartition("/")[2] not in _NEVER


MARK = "recompute"  # the attribute of a block, or of its class


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


def find_blocks(
    model: Any,
    children: Callable[[Any], Iterable[tuple[str, Any]]],
    is_repeatable: Callable[[Any, Any], bool],
    remedy: tuple[str, str, str],
) -> list[Any]:
    """Return the blocks of a model: the outermost marked ones, or those of one class in one place."""

    def below(part: Any, chosen: Callable[[Any], set[int]]) -> Iterator[Any]:
        own = chosen(part)
        for _, child in children(part):
            if id(child) in own:
                yield child
            else:
                yield from below(child, chosen)

    def marked(part: Any) -> set[int]:
        return {id(child) for _, child in children(part) if getattr(child, MARK, False) is True}

    def repeated(part: Any) -> set[int]:
        alike: dict[type, set[int]] = {}
        for _, child in children(part):
            if is_repeatable(part, child):
                alike.setdefault(type(child), set()).add(id(child))
        return {key for keys in alike.values() if len(keys) > 1 for key in keys}

    found = list(below(model, marked)) or list(below(model, repeated))
    if not found:
        method, base, otherwise = remedy
        raise TaskError(
            f"checkpoint_activations: {method} gave a model without repeated blocks",
            f"Give the class of the block, a {base}, the attribute {MARK} = True, {otherwise}; "
            "or leave --checkpoint-activations out.",
        )
    return list({id(block): block for block in found}.values())
