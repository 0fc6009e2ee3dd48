"""Which worker has which stage of which replica of a split model."""

from dataclasses import dataclass

from hvdtrain.errors import ConfigError
from hvdtrain.storage.text import counted
from hvdtrain.workers.agreement import Workers


@dataclass(frozen=True)
class Layout:
    """The place of one worker.

    The stages of a replica are on workers of consecutive ranks, most of which share a host: activations are
    passed on more often than gradients are summed.

    Attributes:
        rank: rank of the worker.
        size: number of workers.
        stages: number of stages, which divides the number of workers.
    """

    rank: int
    size: int
    stages: int

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
        """Return this worker's place, in words."""
        of_replica = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage + 1} of {self.stages}{of_replica}"
