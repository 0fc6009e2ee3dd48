"""The place of a worker of a split model, and the workers among whom something of it is summed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.storage.text import counted
from hvdtrain.workers.agreement import WorkerPlace, Workers


class Layout(WorkerPlace):
    """The place of a worker of a split model; a replica's stages are on workers of consecutive ranks."""

    @classmethod
    def of(cls, workers: Workers, stages: int) -> "Layout":
        """Return the place of this worker; the number of workers must be a multiple of that of stages."""
        if workers.size % stages:
            raise ConfigError(
                f"stages {stages} divides the workers into replicas of {stages} each, and the job has "
                f"{counted(workers.size, 'worker')}",
                f"Start a multiple of {stages} workers, or choose a number of stages that divides theirs.",
                everywhere=True,
            )
        return cls(workers, stages)

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker computes loss and metrics."""
        return self.stage == self.stages - 1

    def describe(self) -> str:
        """Return this worker's place, as text."""
        of_replica = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage + 1} of {self.stages}{of_replica}"


_process_sets: dict[tuple[int, ...], Any] = {}  # Horovod's process sets of this process, by their ranks


class WorkerGroup(HorovodWorkers):
    """Collective. Some workers of a job: those that have one of some stages, the same on every worker."""

    def __init__(self, layout: Layout, stages: Sequence[int], host: str, collectives: Any) -> None:
        own, every = layout.workers.rank, range(layout.workers.size)
        ranks = [rank for rank in every if rank % layout.stages in stages]
        self.size, self.host, self.is_elastic = len(ranks), host, False
        self.first = ranks[0]  # the rank in the job of the first of them
        self.rank = ranks.index(own) if own in ranks else 0  # 0 if this worker is none of them
        self.process_set = _process_set_of(collectives.hvd, ranks)
        self.collectives = self._collectives = collectives(self)


def _process_set_of(hvd: Any, ranks: Sequence[int]) -> Any:
    """Collective. Return Horovod's set of some workers; None if it is one worker."""
    if len(ranks) == 1:
        return None
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    key = tuple(ranks)
    if key not in _process_sets:
        try:
            _process_sets[key] = hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise EnvironmentFault(
                f"stages: Horovod cannot make a set of the ranks {', '.join(map(str, ranks))}: {error}",
                "Train a split model in a process of its own: Horovod was started for another job.",
            ) from error
    return _process_sets[key]


class StageReducer(GradientReducer):
    """Sums gradients of a stage over its replicas, by ``own``; of shared weights by what ``shared`` has."""

    def __init__(self, own: GradientReducer, shared: Mapping[str, GradientReducer]) -> None:
        super().__init__(None)
        self._own, self._shared = own, shared

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Take the parameters. Local: no collective."""
        super().attach(parameters)
        self._parts = []
        for reducer in dict.fromkeys((self._own, *self._shared.values())):
            paths = [path for path in parameters if self._shared.get(path, self._own) is reducer]
            reducer.attach({path: parameters[path] for path in paths})
            self._parts += [(reducer, paths)] * bool(paths)

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Prepare for the next step. Local: no collective."""
        for reducer, _ in self._parts:
            reducer.follow(in_warmup, passes)

    def sums(self, gradients: Iterable[Any]) -> list[Any]:
        """Collective. Return the sum of each gradient over those that have it."""
        by_path = dict(zip(self._parameters, gradients, strict=True))
        for reducer, paths in self._parts:
            found, _ = reducer.finish([by_path.pop(path) for path in paths])
            by_path |= dict(zip(paths, found, strict=True))
        return [by_path[path] for path in self._parameters]

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return self._own.describe()
