"""What the backends of both frameworks do in the same way, and checks of the workers' copies of a model."""

import zlib
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from hvdtrain.backends.base import Backend, PendingMetrics
from hvdtrain.backends.records import PortableState, Shapes, StatePart
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.step_metrics import NO_SIGNALS, PartialSums
from hvdtrain.backends.trained_set import Change, describe_change, refused_change
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ReplicaDriftError
from hvdtrain.workers.agreement import Workers

_RANKS_NAMED = 8


class CommonBackend:
    """A backend's methods that need nothing of the framework, over the step that ``build`` has chosen."""

    workers: Workers
    model: Any
    replica_state: ReplicaState
    weight_shapes: Shapes
    step: Any
    parts: Any
    _moving: Any
    _state: Any

    def find_comparing(self, batch: HostBatch, training: bool) -> str:
        """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
        found: str = self.step.find_comparing(batch, training)
        return found

    def train_step(
        self, batch: Any, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingMetrics:
        """Collective. Do one optimizer update with the mean gradient over the global batch.

        A step that fails leaves everything as it was, in a job that continues without a worker.
        """
        self.step.begin(batch)
        try:
            if self.workers.is_elastic:
                self._moving.keep()
            with peer_errors():
                pending: PendingMetrics = self.step.train(batch, learning_rate, signals)
                return pending
        except BaseException:
            self.step.forget()
            if self.workers.is_elastic:
                self._moving.restore()
            raise

    def eval_step(self, batch: Any, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        found: PartialSums = self.step.evaluate(batch, partial)
        return found

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingMetrics:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        pending: PendingMetrics = self.step.evaluated(partial, signals)
        return pending

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them."""
        with peer_errors():
            pending: PendingMetrics = self.step.synchronize()
        return pending

    def parameter_checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order."""
        fields = self._state.model.trainable_fields()
        trained = [(field.name, zlib.crc32(field.read().data)) for field in fields]
        return [*trained, *self.replica_state.checksums()]

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        """Collective. Load rank 0's portable state, or a part of it, into every worker."""
        self.step.scatter(state or {}, part)
        self.broadcast_state(0)
        if part is StatePart.ALL:
            self._state.distribute(state)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        raise NotImplementedError

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective."""
        self.parts.clock.restart()

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since the last step. Local: no collective."""
        change: Change = self.parts.trained_set.change()
        return change


def follow_trained(backend: Backend, config: Config, step: int) -> str:
    """Collective. Let the next step follow what callbacks have frozen or thawed; return a note of it."""
    workers, change = backend.workers, backend.trained_change()
    gathered = workers.allgather_object((workers.host, change))
    if not any(any(of_rank) for _, of_rank in gathered):
        return ""
    if (error := refused_change(gathered, config, workers.is_elastic)) is not None:
        raise error
    return describe_change(change, step, backend.follow_trained())


def check_replicas(backend: Backend) -> None:
    """Collective. Check that every worker holds the same model, by one small checksum."""
    workers = backend.workers
    if workers.size == 1:
        return
    checksums = backend.parameter_checksums()
    digest = blake2b(repr(checksums).encode(), digest_size=16).digest()
    digests = workers.allgather_object(digest)
    if len(set(digests)) == 1:
        return
    everyone = workers.allgather_object((workers.host, checksums))
    # of a split model, workers have other parameters
    having: dict[str, dict[int, int]] = {}
    for rank, (_, of_rank) in enumerate(everyone):
        for name, crc in of_rank:
            having.setdefault(name, {})[rank] = crc
    usual = {name: Counter(found.values()).most_common(1)[0][0] for name, found in having.items()}
    differing = {name: found for name, found in having.items() if len(set(found.values())) > 1}
    explained = backend.replica_state.explain({name: set(crcs.values()) for name, crcs in differing.items()})
    differing = {name: found for name, found in differing.items() if name not in explained}
    if not differing:
        return
    drifted = sorted(
        {r for name, found in differing.items() for r, crc in found.items() if crc != usual[name]}
    )
    parameter = next(
        name for name, found in differing.items() if found.get(drifted[0], usual[name]) != usual[name]
    )
    ranks = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in drifted[:_RANKS_NAMED])
    raise ReplicaDriftError(
        f"the workers' parameters differ: {ranks} drifted from the others, first in {parameter}",
        "A worker computed something else: faulty memory, another library, or a task that changes it on its "
        "own. If training does so, name it in the task's state_reductions.",
        everywhere=True,
    )
