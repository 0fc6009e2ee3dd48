"""The workers of a job among which something of a split model is summed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.workers import GATHER, ByteCollectives, frame, messages_in
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.storage.text import counted
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers


@dataclass(frozen=True)
class Layout:
    """The place of one worker.

    The stages of a replica are on workers of consecutive ranks, most of which share a host: activations are
    passed on more often than gradients are summed.
    """

    rank: int  # rank of the worker
    size: int  # number of workers
    stages: int  # number of stages, which divides the number of workers

    @classmethod
    def of(cls, workers: Workers, stages: int) -> "Layout":
        """Return the place of this worker.

        Raises:
            ConfigError: If the number of workers is no multiple of the number of stages.
        """
        if workers.size % stages:
            raise ConfigError(
                f"stages {stages} divides the workers into replicas of {stages} each, and the job has "
                f"{counted(workers.size, 'worker')}",
                f"Start a multiple of {stages} workers, or choose a number of stages that divides theirs.",
                everywhere=True,
            )
        return cls(workers.rank, workers.size, stages)

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.size // self.stages

    @property
    def replica(self) -> int:
        """The replica that this worker belongs to, from 0."""
        return self.rank // self.stages

    @property
    def stage(self) -> int:
        """The stage that this worker has, from 0."""
        return self.rank % self.stages

    @property
    def is_first(self) -> bool:
        """Whether this worker has the first stage, which is given the samples."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this worker has the last stage, which computes loss and metrics."""
        return self.stage == self.stages - 1

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Return the ranks that have a stage, in the order of replicas."""
        return [replica * self.stages + stage for replica in range(self.replicas)]

    def ranks_of_stages(self, stages: list[int]) -> list[int]:
        """Return the ranks that have one of some stages, in order."""
        return sorted(rank for stage in stages for rank in self.ranks_of_stage(stage))

    def ranks_of_replica(self) -> list[int]:
        """Return the ranks of this worker's replica, in the order of stages."""
        first = self.replica * self.stages
        return list(range(first, first + self.stages))

    def describe(self) -> str:
        """Return this worker's place, as text."""
        of_replica = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage + 1} of {self.stages}{of_replica}"


_known: dict[tuple[int, ...], Any] = {}  # Horovod's process sets of this process, by their ranks


class WorkerGroup:
    """Some workers of a job: those that have a stage, or one of some stages.

    Args:
        ranks: their ranks, in order.
        rank: rank of this worker, which may be none of them.
        host: this host's name.
        process_set: Horovod's set of them; None if there is one of them.

    Attributes:
        size: their number.
        rank: which of them this worker is; 0 if it is none of them.
        host: this host's name.
        may_reduce: whether there is something to sum.
        is_elastic: whether the number of workers may change: never.
        process_set: see above.
    """

    def __init__(self, ranks: Sequence[int], rank: int, host: str, process_set: Any) -> None:
        self.size = len(ranks)
        self.rank = list(ranks).index(rank) if rank in ranks else 0
        self.host = host
        self.may_reduce = self.size > 1
        self.is_elastic = False
        self.process_set = process_set


class TalkingGroup:
    """Workers of a group that tell one another objects, as those of a job do.

    Args:
        group: the group.
        collectives: what moves bytes within it.

    Attributes:
        size: their number.
        rank: which of them this worker is.
    """

    def __init__(self, group: WorkerGroup, collectives: ByteCollectives) -> None:
        self.size, self.rank = group.size, group.rank
        self._collectives = collectives

    def allgather_object(self, value: Any) -> list[Any]:
        """Collective in the group. Return the values of all of them, in the order of ranks."""
        if self.size == 1:
            return [value]
        joined = self._collectives.join(frame(GATHER, value), "hvdtrain.objects.of_group")
        messages = messages_in(joined, self.size, GATHER)
        return [wire.decode(message, f"worker {number}") for number, message in enumerate(messages)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Collective in the group. Return the root's value on all of them."""
        return self.allgather_object(value if self.rank == root else None)[root]


def process_set_of(hvd: Any, ranks: Sequence[int]) -> Any:
    """Collective. Return Horovod's set of some workers; None if it is one worker.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``, which was started with dynamic process sets.
        ranks: their ranks, in order; the same on every worker.

    Raises:
        EnvironmentFault: If Horovod was started without process sets.
    """
    if len(ranks) == 1:
        return None
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    key = tuple(ranks)
    if key not in _known:
        try:
            _known[key] = hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise EnvironmentFault(
                f"stages: Horovod cannot make a set of the ranks {', '.join(map(str, ranks))}: {error}",
                "Train a split model in a process of its own: Horovod was started for another job.",
            ) from error
    return _known[key]


class StageGroups:
    """The workers that have what a worker of a split model has. Making it is collective.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        layout: the place of this worker.
        host: this host's name.
        shared: the stages that share weights, in order; the same on every worker.

    Attributes:
        own: those that have the stage of this worker.
        of_shared: those that have one of some stages that share weights, by these stages.
    """

    def __init__(self, hvd: Any, layout: Layout, host: str, shared: Sequence[tuple[int, ...]]) -> None:
        def group(stages: Sequence[int]) -> WorkerGroup:
            ranks = layout.ranks_of_stages(list(stages))
            return WorkerGroup(ranks, layout.rank, host, process_set_of(hvd, ranks))

        self.own = [group([stage]) for stage in range(layout.stages)][layout.stage]
        self.of_shared = {stages: group(stages) for stages in sorted(set(shared))}

    def of(self, stages: Sequence[int]) -> WorkerGroup:
        """Return the workers that have what these stages have."""
        return self.own if len(stages) == 1 else self.of_shared[tuple(stages)]


def stages_that_share(owners: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the stages that have weights in common, each such set once."""
    return sorted({tuple(stages) for stages in owners if len(stages) > 1})
