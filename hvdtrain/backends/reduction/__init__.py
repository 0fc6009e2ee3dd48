"""How the gradients of all workers become one, in both frameworks: the protocol, and the choice by config."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

from hvdtrain.backends.portable.names import KEPT, is_kept
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction.shards import LEAST_BYTES
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of, rank_of
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

_OVERLAPS = {"auto": None, "true": True, "false": False}


@dataclass(frozen=True)
class Kept:
    """Something that a reducer keeps from step to step: one array of the portable state."""

    name: str  # in the portable state, after ``compression/``
    tensor: Any  # where it is now
    shape: tuple[int, ...]  # of the portable array
    first: Any  # its values before the first step
    # whether each worker has its own. The portable array is their sum, and each continues from an equal
    # part of it
    is_part: bool = False

    @property
    def portable_name(self) -> str:
        """Its name in the portable state."""
        return f"{KEPT}/{self.name}"


class GradientReducer:
    """Sums gradients over workers. Each gradient is this worker's part of the mean already.

    A framework's ``Reducer`` has what does not depend on how gradients travel. A reducer is a class derived
    from it, with ``_sum`` and ``describe`` of its own at least, and a row of ``config.values.COMPRESSIONS``.

    Args:
        workers: the job's workers.
        scaled: whether a loss scale has multiplied the gradients by the number of workers.

    Attributes:
        clock: measures how long this worker is busy; None if nobody does.
        title: its name in messages, if it keeps something from step to step.
        overwrites: whether ``finish`` may overwrite the gradients that it is given.
        overlaps: whether reductions begin during the backward pass, the same on all workers; None: on a GPU,
            and between hosts. Not all reducers can do that.
    """

    clock: Any = None
    title = ""
    overwrites = True
    overlaps: bool | None = None

    def __init__(self, workers: Any, scaled: bool = False) -> None:
        self._workers = workers
        self._scaled = scaled
        self._parameters: dict[str, Any] = {}

    @classmethod
    def of(cls, config: Config, workers: Any, fields: Iterable[Any] = (), loss_scale: Any = None) -> Self:
        """Return the one that a config requests; the arguments are those of ``choose_reducer``."""
        return cls(workers, config.precision == "fp16")

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Take the parameters, by name, whose gradients will be reduced. Local: no collective.

        Called again, it forgets whatever a step that failed has begun.
        """
        self._parameters = dict(parameters)

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Prepare for the next step. Local: no collective.

        In PyTorch it is called while no parameter has a gradient: the reducer may give them some of its own.

        Args:
            in_warmup: whether the step lies in the learning rate's warm-up.
            passes: how many backward passes complete its gradients.
        """

    def start(self, gradients: Sequence[Any]) -> None:
        """Begin as much of ``finish`` as waits for no other worker. Local: no collective."""

    def finish(self, gradients: Any, vector: Any = None) -> tuple[list[Any], Any]:
        """Collective. Return the sum of each gradient over workers, and that of a short vector.

        TensorFlow calls it while a step is traced.

        Args:
            gradients: one for each attached parameter, in the same order; dense in TensorFlow. The list may
                be emptied, so that memory of gradients is freed that are copied.
            vector: what else a step sums, which is not compressed; None for nothing. It may be overwritten,
                and have another length in each step.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        raise NotImplementedError

    def begins_early(self, size: int, on_gpu: bool) -> bool:
        """Return whether gradients are sent during the backward pass, the same on all workers.

        On a host they travel through memory, which a CPU's cores are needed for; between hosts they wait.

        Args:
            size: bytes of the gradients.
            on_gpu: whether they are on a GPU.
        """
        if self.overlaps is not None:
            return self.overlaps
        return on_gpu or (spans_hosts(self._workers) and size >= 2 * LEAST_BYTES)

    @property
    def is_early(self) -> bool:
        """Whether gradients of the attached parameters are sent during the backward pass."""
        return False

    def kept(self) -> Sequence[Kept]:
        """Return what it keeps from step to step. Local: no collective."""
        return ()

    def state(self) -> PortableState:
        """Collective. Return what it keeps as it is saved; workers continue as a job that loads it does."""
        return {one.portable_name: self._read(one) for one in self.kept()}

    def load(self, state: PortableState) -> None:
        """Continue from what a whole state has of this, or from the beginning. Local: no collective.

        Raises:
            TaskError: If what it has is of another model.
        """
        known = self.kept()
        found = kept_in(state) if known else {}
        shapes = {name: tuple(array.shape) for name, array in found.items()}
        expected = {one.portable_name: one.shape for one in known}
        if found and shapes != expected:
            name = min(n for n in {*shapes, *expected} if shapes.get(n) != expected.get(n))
            raise TaskError(
                f"the state of {self.title} does not fit the model: {name} must be "
                f"{expected.get(name, 'absent')}, is {shapes.get(name, 'absent')}",
                "Resume with --compression none, which drops it, or use --init.",
            )
        for one in known:
            self._write(one, found.get(one.portable_name, one.first))

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""
        raise NotImplementedError

    def _sum(self, gradients: Any) -> list[Any]:
        """Collective. Return the sum of each gradient over several workers."""
        raise NotImplementedError

    def _read(self, kept: Kept) -> Any:
        """Collective. Return something that is kept as a portable array."""
        raise NotImplementedError

    def _write(self, kept: Kept, array: Any) -> None:
        """Continue from a portable array. Local."""
        raise NotImplementedError


def meanwhile(parts: int) -> str:
    """Return how gradients travel in parts that are sent early, for the plan; empty for none or one."""
    return f", in {parts} parts during the backward pass (overlap)" if parts > 1 else ""


def spans_hosts(workers: Any) -> bool:
    """Return whether workers are on several hosts, the same on all of them.

    False of a part of a job, and of a graph that is traced once for worlds of any size.
    """
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
    ranks = rank_of(before), rank_of(compression)
    return (
        rest,
        f"what {other} of rank {ranks[0]} had not sent yet is dropped, and rank {ranks[1]} starts anew",
    )
