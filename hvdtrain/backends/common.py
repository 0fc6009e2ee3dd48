"""What the backends of both frameworks do in the same way, each with parts of its own."""

import zlib
from typing import Any

from hvdtrain.backends.base import PendingMetrics, PortableState, Shapes
from hvdtrain.backends.objective.metric_states import Collectives
from hvdtrain.backends.replica_state import ReplicaState, Talking
from hvdtrain.backends.trained_set import Change
from hvdtrain.backends.workers import peer_errors
from hvdtrain.workers.agreement import Workers, run_on_rank_zero


class CommonBackend:
    """A backend's methods that need nothing of the framework. ``build`` makes the parts.

    Attributes:
        collectives: the class of what moves objects and metrics through the framework's binding of Horovod.
        state_tensors: the class of what reads and writes the state that no optimizer updates.
    """

    collectives: type[Collectives]
    state_tensors: Any
    workers: Workers
    model: Any
    replica_state: ReplicaState
    _clock: Any
    _local: Any
    _low_rank: Any
    _state: Any
    _trained_set: Any

    def synchronize(self) -> PendingMetrics:
        """Collective. Make the workers equal after local steps; return the sums of all of them."""
        assert self._local is not None  # the loop calls it in a job with local steps
        with peer_errors():
            pending: PendingMetrics = self._local.synchronize()
        return pending

    def restart_clock(self) -> None:
        """Begin the busy time of the next step now: it leaves out what came before. Local: no collective."""
        self._clock.restart()

    def trained_change(self) -> Change:
        """Return what has been frozen, thawed or replaced since the last step. Local: no collective."""
        change: Change = self._trained_set.change()
        return change

    def checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers, in a fixed order."""
        fields = self._state.model.trainable_fields()
        trained = [(field.name, zlib.crc32(field.read().data)) for field in fields]
        return [*trained, *self.replica_state.checksums()]

    def scatter_state(self, state: PortableState | None) -> None:
        """Collective. Load rank 0's portable state into every worker's model and optimizer."""
        run_on_rank_zero(self.workers, lambda: self._load(state or {}))
        self.broadcast_state(0)
        self._state.distribute(state)

    def weight_shapes(self) -> Shapes:
        """Return the shapes of the model's arrays, by portable name. Local: no collective."""
        shapes: Shapes = self._state.weight_shapes()
        return shapes

    def scatter_weights(self, weights: PortableState | None, is_part: bool = False) -> None:
        """Collective. Load rank 0's weights into every worker's model; its optimizer stays as it is."""
        run_on_rank_zero(self.workers, lambda: self._load_weights(weights or {}, is_part))
        self.broadcast_state(0)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        raise NotImplementedError

    def _load(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer, and what compression keeps. Local."""
        raise NotImplementedError

    def _load_weights(self, weights: PortableState, is_part: bool) -> None:
        """Load the model's part of a portable state. Local."""
        raise NotImplementedError

    def _kept_by_compression(self) -> PortableState:
        """Collective. Return what the reducer keeps from step to step."""
        if self._low_rank is None:
            return {}
        with peer_errors():
            kept: PortableState = self._low_rank.state()
        return kept

    def _make_replica_state(self, task: Any) -> None:
        """Make what keeps the workers' copies of state that no optimizer updates alike."""
        self._follow_state(task, self.workers, self.collectives())

    def _follow_state(self, task: Any, replicas: Talking, collectives: Collectives) -> None:
        self._replicas = replicas
        self._state_tensors = self.state_tensors(self.model, self._state.model)
        is_whole = replicas is self.workers
        self.replica_state = ReplicaState(task, replicas, collectives, self._state_tensors, is_whole)
