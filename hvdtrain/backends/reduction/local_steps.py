"""Local steps: what both frameworks' ``steps/plain_step.py`` share."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.backends.portable.initial_values import share_of_new
from hvdtrain.backends.records import ModelInfo, PortableState, StateArrays
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.errors import TaskError
from hvdtrain.schedule import Cadence

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


class LocalStepBase:
    """A step of this worker alone; ``synchronize`` makes the workers equal. It stands before ``PlainStep``.

    Parameters and what the optimizer keeps are averaged over the workers. The outer optimizer ``average``
    continues from that; ``nesterov`` takes a step of SGD with Nesterov momentum::

        g = parameters of the last synchronisation - average of the parameters now
        v = outer_momentum * v + g
        parameters = parameters of the last synchronisation - outer_learning_rate * (g + outer_momentum * v)

    Source: DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
    """

    is_timed = False
    parts: Any
    local: Any
    pending: Any  # the class of metrics on their way from the device
    fields: list[Any]  # of the outer optimizer's momentum
    momenta: list[Any]  # its tensors
    _note_start: Any  # notes where the workers start from
    run: Any  # does a step; returns its vector, and names, names with weights and what got no gradient
    _synchronized: Any  # collective: makes the workers equal; returns the sum of the steps' vectors
    _zero: Any  # makes a tensor zero

    def attach(self, parts: Any) -> None:
        """Take the parts of the step. Local: no collective."""
        super().attach(parts)  # type: ignore[misc]
        self.local, self._sums = self, LocalSums()

    def train(self, batch: Any, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Do a step, and return its metrics, which are this worker's own. Local: no collective."""
        sums = self._sums
        if sums.steps == 0:
            self._note_start()
        vector, (names, weighted, unused) = self.run(batch, learning_rate, signals)
        if sums.vector is not None and (names, weighted) != (sums.names, sums.weighted):
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

    def describe(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of the job, with what travels between workers."""
        config = self.parts.config
        every = Cadence(config.sync_every).describe()
        text = f"stay on their worker; {every} the workers average parameters"
        text += " and the optimizer's state, in fp32"
        if config.outer_optimizer != "average":
            text += f", and an outer step follows: SGD, Nesterov momentum {config.outer_momentum:g}"
            text += f", learning rate {config.outer_learning_rate:g}"
        return replace(info, reduction=text)


def in_parts(tensors: Sequence[tuple[str, int]], most: int = _PART_BYTES) -> list[list[int]]:
    """Return the numbers of tensors that travel as one: few messages, and little memory for copies."""
    parts: list[list[int]] = []
    open_parts: dict[str, tuple[list[int], int]] = {}
    for number, (kind, size) in enumerate(tensors):
        part, filled = open_parts.get(kind, ([], 0))
        if not part or filled + size > most:
            part, filled = [], 0
            parts.append(part)
        part.append(number)
        open_parts[kind] = part, filled + size
    return parts


def has_outer(state: StateArrays) -> bool:
    """Return whether a portable state has the momentum of an outer optimizer."""
    return any(name.startswith(f"{OUTER_PREFIX}/") for name in state)


def without_outer(state: PortableState) -> PortableState:
    """Return a portable state without the momentum of an outer optimizer, which then starts from zero."""
    # also without a framework's private names of it
    return {name: array for name, array in state.items() if f"{OUTER_PREFIX}/" not in name}
