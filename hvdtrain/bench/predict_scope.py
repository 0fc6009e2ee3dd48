"""Which jobs a plan predicts, and which ways of exchanging what workers learn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.agreement import Workers
from hvdtrain.backends.named_optimizers import own_optimizer_method
from hvdtrain.compression import rank_of
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, UsageError
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.jobs.compatibility import Job, check, find_conflict

RANK, EVERY = 4, 10  # of the ways that a job does not name itself


@dataclass(frozen=True)
class Others:
    """The ways beside the uncompressed one.

    Attributes:
        rank: of PowerSGD.
        every: of local steps; None if the job cannot have them.
        own: the name of the way that the job's config asks for.
    """

    rank: int
    every: int | None
    own: str

    @classmethod
    def of(cls, config: Config, task: Any, workers: Workers) -> "Others":
        """Return those that a job can have, with its own rank and steps if it names them.

        Raises:
            ConfigError: If it asks for local steps and cannot have them, or what they send is not known.
        """
        rank, every = rank_of(config.compression), config.sync_every
        own = config.compression if every is None else f"sync-every {every}"
        own_optimizer = own_optimizer_method(task, config)
        if every is not None and own_optimizer:
            raise ConfigError(
                f"sync_every {every}: how much the optimizer of {own_optimizer}() keeps and sends is unknown",
                "Plan with an optimizer of hvdtrain's (--optimizer), or measure with bench.",
                everywhere=True,
            )
        check(Job(config, task, workers))
        if every is None and not own_optimizer:
            with_local_steps = config.model_copy(update={"sync_every": EVERY, "compression": "none"})
            if find_conflict(Job(with_local_steps, task, workers)) is None:
                every = EVERY
        return cls(rank or RANK, every, own)


def check_predictable(config: Config) -> None:
    """Check that a job has nothing that a plan does not predict.

    Raises:
        UsageError: naming what it has, and what to do.
    """
    if config.global_batch_size is not None:
        problem = (
            "with global_batch_size a worker's batch shrinks as workers are added, and how long it then "
        )
        problem += "computes is not measured"
        remedy = (
            "Give --batch-size, that of a worker: for G samples in all on N workers, --batch-size G/N, and "
        )
        remedy += "read the row of N workers."
    elif config.sync_batch_norm:
        problem = "sync_batch_norm sends messages in every batch-norm layer, which a plan does not predict"
        remedy = "Leave it out; bench --sweep measures such jobs."
    elif config.compression == "bf16":
        problem = "compression bf16 exchanges parts of gradients, of which a plan has no measured sums"
        remedy = "Plan with --compression fp16, which has as many bytes."
    elif config.shard != "none":
        problem = f"shard {config.shard} gathers parameters in every step, which a plan does not predict"
        remedy = "Plan without it, or measure with bench."
    elif config.stages > 1:
        problem = f"stages {config.stages} passes activations between workers, which a plan does not predict"
        remedy = "Plan without it; metrics.jsonl has the speed of a training with stages."
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)


def check_workers(size: int) -> None:
    """Check that there are workers that exchange something.

    Raises:
        UsageError: If there is one.
    """
    if size < 2:
        raise UsageError(
            "a plan is computed from sums over two workers or more, and this job has one",
            "Start more, for example: horovodrun -np 2 python -m hvdtrain plan ...",
            everywhere=True,
        )


def check_hosts(hosts: Sequence[str], local_sizes: Sequence[int]) -> None:
    """Check that all hosts have as many workers, and names of their own.

    Args:
        hosts: by rank, the worker's host.
        local_sizes: by rank, how many workers its host has.

    Raises:
        UsageError: If one differs.
    """
    counts = Counter(hosts)
    if any(counts[host] != size for host, size in zip(hosts, local_sizes, strict=True)):
        raise UsageError(
            f"hosts have the same name ({', '.join(counts)}): a plan cannot tell which workers share one",
            "Give each host a hostname of its own.",
            everywhere=True,
        )
    least = min(counts.values())
    if max(counts.values()) > least:
        given, alike = (
            ",".join(f"{host}:{number}" for host, number in numbers.items())
            for numbers in (counts, dict.fromkeys(counts, least))
        )
        raise UsageError(
            f"hosts with different numbers of workers ({given}) compute and communicate differently: a plan "
            "takes all hosts to be alike",
            f"Start as many on each, for example: -H {alike}",
            everywhere=True,
        )


def check_task(config: Config, task: Any) -> None:
    """Check that the task has no training step of its own.

    Raises:
        UsageError: If it has.
    """
    method = FRAMEWORKS[config.framework].step_method
    if hasattr(task, method):
        raise UsageError(
            f"the task's own {method} may sum gradients several times in a step: a plan does not predict it",
            "Measure it with bench --sweep.",
            everywhere=True,
        )
