"""The workers of a job among which something of a split model is summed."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.backends.frames import GATHER, frame, messages_in
from hvdtrain.backends.pipeline.layout import Layout
from hvdtrain.backends.workers import ByteCollectives
from hvdtrain.errors import EnvironmentFault
from hvdtrain.workers import wire

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


def group_of(workers: object) -> dict[str, Any]:
    """Return the arguments of Horovod's operations that make them those of some workers only.

    Args:
        workers: the workers; of a part of the job, they have a ``process_set``.
    """
    process_set = getattr(workers, "process_set", None)
    return {} if process_set is None else {"process_set": process_set}
