"""In what workers differ that must be equal: their values arrive in parts, on request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.elastic.messages import Values
from hvdtrain.errors import AgreementError
from hvdtrain.workers.agreement import SAME_COMMAND, disagreement

VALUES_SECONDS = 10.0

_MAX_PARTS = 1000


@dataclass
class Comparison:
    """The values of some workers, as far as they have arrived.

    Attributes:
        workers: the names of the workers with their hosts, in the order of ranks.
        until: when it is over, even if values are missing.
    """

    workers: Sequence[tuple[str, str]]
    until: float
    _parts: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)

    def take(self, worker: str, message: Values) -> None:
        """Take a part of a worker's values."""
        if worker not in dict(self.workers) or not 0 <= message.part < message.of <= _MAX_PARTS:
            return
        parts = self._parts.setdefault(worker, {})
        parts[message.part] = message.values
        if len(parts) == message.of:
            self._complete.add(worker)

    def drop(self, worker: str) -> None:
        """Await nothing more of a worker: it has ended."""
        self._complete.add(worker)

    def is_over(self, now: float) -> bool:
        """Return whether all values have arrived, or nothing more is awaited."""
        return now >= self.until or len(self._complete) == len(self.workers)

    def result(self) -> AgreementError:
        """Return the error that says in what the workers differ."""
        everyone = []
        for name, host in self.workers:
            values: dict[str, str] = {}
            for part in self._parts.get(name, {}).values():
                values.update(part)
            if values:
                everyone.append((host, values))
        if len(everyone) < 2:
            return AgreementError("the workers disagree before training", SAME_COMMAND)
        return disagreement(everyone, SAME_COMMAND)
