"""How the gradients of all workers become one, in both frameworks: the base class, the choice by config."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Self

from hvdtrain.backends.portable.names import is_kept
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction.shards import LEAST_BYTES
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of, rank_of
from hvdtrain.errors import ConfigError
from hvdtrain.host.frameworks import FRAMEWORKS

_OVERLAPS = {"auto": None, "true": True, "false": False}


class GradientReducer:
    """Sums gradients over workers. Each gradient is this worker's part of the mean already.

    A reducer is derived from a framework's ``AllReduce``, with ``_cast_for``, or ``Reducer``, with ``_sum``
    and ``describe``, and a row of ``config.values.COMPRESSIONS``.
    """

    clock: Any = None  # measures how long this worker is busy; None if nobody does
    overwrites = True  # whether ``finish`` may overwrite the gradients that it is given
    # whether reductions begin during the backward pass, where a reducer can do that, the same on all workers;
    # None: on a GPU, and between hosts
    overlaps: bool | None = None

    def __init__(self, workers: Any, scaled: bool = False) -> None:
        self._workers = workers
        self._scaled = scaled  # whether a loss scale has multiplied the gradients by the number of workers
        self._parameters: dict[str, Any] = {}

    @classmethod
    def of(cls, config: Config, workers: Any, fields: Iterable[Any] = (), loss_scale: Any = None) -> Self:
        """Return the one that a config requests; the arguments are those of ``choose_reducer``."""
        return cls(workers, config.precision == "fp16")

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Take the parameters, by name, and forget whatever a step that failed has begun. Local."""
        self._parameters = dict(parameters)

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Prepare for the next step, whose gradients some backward passes complete. Local: no collective.

        In PyTorch it is called while no parameter has a gradient: the reducer may give them some of its own.
        """

    def start(self, gradients: Sequence[Any]) -> None:
        """Begin as much of ``finish`` as waits for no other worker. Local: no collective."""

    def finish(self, gradients: Any, vector: Any = None) -> tuple[list[Any], Any]:
        """Collective. Return the sum of each gradient, and that of a short vector; may empty the list."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        raise NotImplementedError

    def begins_early(self, size: int, on_gpu: bool) -> bool:
        """Return whether gradients are sent during the backward pass, the same on all workers."""
        # on a host they travel through memory, which a CPU's cores are needed for; between hosts they wait
        if self.overlaps is not None:
            return self.overlaps
        return on_gpu or (spans_hosts(self._workers) and size >= 2 * LEAST_BYTES)

    @property
    def is_early(self) -> bool:
        """Whether gradients of the attached parameters are sent during the backward pass."""
        return False

    def state(self) -> PortableState:
        """Collective. Return what it keeps as it is saved; workers continue as a job that loads it does."""
        return {}

    def load(self, state: PortableState) -> None:
        """Continue from what a whole state has of this, or from the beginning. Local: no collective."""

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""

    def _sum(self, gradients: Any) -> list[Any]:
        """Collective. Return the sum of each gradient over several workers."""
        raise NotImplementedError


def meanwhile(parts: int) -> str:
    """Return how gradients travel in parts that are sent early, for the plan; empty for none or one."""
    return f", in {parts} parts during the backward pass (overlap)" if parts > 1 else ""


def spans_hosts(workers: Any) -> bool:
    """Return whether workers are on several hosts; False of a part of a job, and of a traced graph."""
    size, local_size = workers.size, getattr(workers, "local_size", None)
    return isinstance(size, int) and local_size is not None and local_size < size


def no_bf16() -> ConfigError:
    """Return the error of a job whose gradients are to travel as bf16, with a Horovod that sums none."""
    return ConfigError(
        "compression: bf16: the installed Horovod sums no bf16 on the devices of this job",
        "Use --compression fp16. Builds of hvdtrain sum bf16 on CPUs: python -m hvdtrain build-horovod",
    )


def reducer_class(framework: str, compression: str) -> type[GradientReducer]:
    """Return the reducer of a row of ``COMPRESSIONS``, in a framework: "torch" or "tf"."""
    folder = FRAMEWORKS[framework].module.rpartition(".")[0]
    module, name = compression_of(compression).reducer.split(".")
    found: type[GradientReducer] = getattr(import_module(f"{folder}.reduction.{module}"), name)
    return found


def choose_reducer(
    config: Config, workers: Any, fields: Iterable[Any] = (), loss_scale: Any = None
) -> GradientReducer:
    """Return the reducer that a config requests."""
    reducer = reducer_class(config.framework, config.compression).of(config, workers, fields, loss_scale)
    # XLA's backward pass gives all gradients at once
    is_xla = config.compile and config.framework == "tf"
    reducer.overlaps = False if is_xla else _OVERLAPS[config.overlap]
    return reducer


def kept_in(state: PortableState) -> PortableState:
    """Return what a portable state has of reducers."""
    return {name: array for name, array in state.items() if is_kept(name)}


def fitting_state(state: PortableState, compression: str, before: str) -> tuple[PortableState, str]:
    """Return a checkpoint's state as a job can continue from it, and what the user should know of that."""
    own, other = compression_of(compression).keeps, compression_of(before).keeps
    kept = kept_in(state)
    rest = {name: array for name, array in state.items() if name not in kept}
    if not own:
        return rest, f"what {other} had not sent yet is dropped: this job does not use it" if kept else ""
    if not kept:
        return rest, f"the checkpoint has nothing of {own}: its error starts from zero"
    if compression == before:
        return state, ""
    was, now = rank_of(before), rank_of(compression)
    return rest, f"what {other} of rank {was} had not sent yet is dropped, and rank {now} starts anew"
