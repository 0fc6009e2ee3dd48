"""Local steps: what both frameworks' ``steps/local_step.py`` share."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.backends.portable.initial_values import share_of_new
from hvdtrain.backends.records import ModelInfo, PortableState, StateArrays
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.schedule import Cadence
from hvdtrain.workers.agreement import Workers

# of the outer optimizer's momentum in the portable state
OUTER_PREFIX = "optimizer/outer_momentum"
_PART_BYTES = 64 << 20  # a message that long takes many times its latency, and its copy little memory


@dataclass
class LocalSums:
    """What the local steps since the last synchronisation add up to, on this worker."""

    names: tuple[str, ...] = ()  # "loss" and the task's metrics
    weighted: tuple[str, ...] = ()  # those of them that have weights of their own
    # sum of the steps' vectors, see ``StepMetrics.from_vector``; None before the first step
    vector: Any = None
    weight: float = 0.0  # sum of the samples' weights over the steps and all workers
    # this worker's parameters that got no gradient in some step, by portable name
    unused: dict[str, None] = field(default_factory=dict)
    last_step: int = 0  # number of the last of the steps, from 1
    steps: int = 0  # how many they are

    def ema_share(self, decay: float) -> float:
        """Return the part of a moving average that the weights make up, had they been these at every step."""
        kept = 1.0
        for step in range(self.last_step - self.steps + 1, self.last_step + 1):
            kept *= 1 - share_of_new(step, decay)
        return 1 - kept


class LocalStepsBase:
    """Adds up what local steps give, and makes the workers equal.

    Parameters and what the optimizer keeps are averaged over the workers. The outer optimizer ``average``
    continues from that; ``nesterov`` takes a step of SGD with Nesterov momentum::

        g = parameters of the last synchronisation - average of the parameters now
        v = outer_momentum * v + g
        parameters = parameters of the last synchronisation - outer_learning_rate * (g + outer_momentum * v)

    Source: DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
    """

    pending: type[PendingVector]
    fields: list[Any]  # of the outer optimizer's momentum
    momenta: list[Any]  # its tensors
    _note_start: Any  # notes where the workers start from
    _synchronized: Any  # collective: makes the workers equal; returns the sum of the steps' vectors
    _zero: Any  # makes a tensor zero

    def __init__(self, parts: Any) -> None:
        self._ema, self._config = parts.ema, parts.config
        self._workers: Workers = parts.workers
        self._loss_scale = parts.loss_scale
        self._sums = LocalSums()

    def begin(self) -> None:
        """Begin a local step: the first one notes where the workers start from."""
        if self._sums.steps == 0:
            self._note_start()

    def add(
        self, batch: Any, form: tuple[tuple[str, ...], tuple[str, ...]], vector: Any, unused: Sequence[str]
    ) -> PendingVector:
        """Add a local step; return its metrics, which are this worker's own."""
        sums, (names, weighted) = self._sums, form
        if sums.vector is not None and form != (sums.names, sums.weighted):
            raise TaskError(
                f"a step gives {', '.join(names)} and the step before it {', '.join(sums.names)}",
                "With sync_every, the metrics of several steps are added up: give the same in every step.",
            )
        sums.vector = vector if sums.vector is None else sums.vector + vector
        sums.names, sums.weighted, sums.last_step = names, weighted, batch.step + 1
        sums.weight += batch.total_weight
        sums.unused |= dict.fromkeys(unused)
        sums.steps += 1
        return self.pending(names, vector, batch.reduced_weight, unused, weighted)

    def synchronize(self) -> PendingVector:
        """Collective. Make the workers equal, and return the sums of all local steps since they last were."""
        sums, self._sums = self._sums, LocalSums()
        vector = self._synchronized(sums)
        return self.pending(sums.names, vector, sums.weight, tuple(sums.unused), sums.weighted)

    def restart(self) -> None:
        """Start with no momentum of the outer optimizer."""
        for momentum in self.momenta:
            self._zero(momentum)


class LocalStepRules:
    """What both frameworks share of a step of this worker alone; it stands before ``PlainStep``."""

    is_timed = False
    local_kind: Any
    local: Any
    parts: Any
    workers: Workers

    def attach(self, parts: Any) -> None:
        """Take the parts of the step. Local: no collective."""
        super().attach(parts)  # type: ignore[misc]
        self.local = self.local_kind(parts)

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of the job, with what is known of its step. Local: no collective."""
        return replace(info, reduction=describe_local_steps(self.parts.config))

    def to_broadcast(self) -> Sequence[Any]:
        """Return the outer optimizer's momentum, as Horovod broadcasts it."""
        found: Sequence[Any] = self.local.momenta
        return found

    def synchronize(self) -> PendingVector:
        """Collective. Make the workers equal; return the sums of the steps since they last were."""
        pending: PendingVector = self.local.synchronize()
        return pending


def in_parts(tensors: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Return the numbers of tensors that are averaged as one: few messages, and little memory for copies."""
    parts: list[list[int]] = []
    open_parts: dict[str, tuple[list[int], int]] = {}
    for number, (kind, size) in enumerate(tensors):
        part, filled = open_parts.get(kind, ([], 0))
        if part and filled + size > _PART_BYTES:
            part, filled = [], 0
        if not part:
            parts.append(part)
        part.append(number)
        open_parts[kind] = part, filled + size
    return parts


def describe_local_steps(config: Config) -> str:
    """Return what travels between workers, for the plan."""
    every = Cadence(config.sync_every or 1).describe()
    text = f"stay on their worker; {every} the workers average parameters and the optimizer's state, in fp32"
    if config.outer_optimizer == "average":
        return text
    return (
        f"{text}, and an outer step follows: SGD, Nesterov momentum {config.outer_momentum:g}, learning rate "
        f"{config.outer_learning_rate:g}"
    )


def has_outer(state: StateArrays) -> bool:
    """Return whether a portable state has the momentum of an outer optimizer."""
    return any(name.startswith(f"{OUTER_PREFIX}/") for name in state)


def without_outer(state: PortableState) -> PortableState:
    """Return a portable state without the momentum of an outer optimizer, which then starts from zero."""
    # also without a framework's private names of it
    return {name: array for name, array in state.items() if f"{OUTER_PREFIX}/" not in name}
