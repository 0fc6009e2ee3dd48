"""The workers of a job, and their agreement on what they are about to do."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hvdtrain.errors import AgreementError, ConfigError, HvdtrainError
from hvdtrain.workers.activity import ACTIVITY

if TYPE_CHECKING:
    from hvdtrain.workers.world import World

T = TypeVar("T")

_LINES = 8
_ANSWER_SECONDS = 2.0  # far below every limit on the duration of a collective

SAME_COMMAND = "Give every worker the same command, files and installation."


class Workers:
    """The workers of a job, as one of them sees them. Of this class itself, one that is alone."""

    def __init__(self, host: str, local_rank: int = 0, local_size: int = 1) -> None:
        self.host = host  # this host's name
        self.rank, self.size = 0, 1  # this worker, from 0, and number of workers
        self.local_rank, self.local_size = local_rank, local_size  # the same of this host
        self.controller = "none"  # what coordinates the workers: "MPI", "Gloo" or "none" (one worker)
        self.coordination = "none"  # as the plan says it: between hosts, MPI leaves large sums to Gloo
        self.is_elastic = False  # whether their number, and with it rank and size, may change in the job
        # with fewer workers an elastic job waits, and it has no more; the size of one that is not elastic
        self.least = self.most = 1

    @property
    def may_reduce(self) -> bool:
        """Whether this worker may ever have others: whether collectives are compiled into steps."""
        return self.is_elastic or self.size > 1

    def restart(self, world: "World") -> None:
        """Collective. Enter a world of an elastic job: take rank and size anew."""

    def leave(self, *, broken: bool) -> None:
        """Leave the world of an elastic job: stop Horovod. Local if the world is broken."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Collective. Return the root's value, of types that travel (see wire.py), on every worker."""
        return value

    def allgather_object(self, value: Any) -> list[Any]:
        """Collective. Return the values of all workers, in the order of ranks, on every worker."""
        return [value]

    def barrier(self) -> None:
        """Collective. Wait until every worker is here."""
        self.allgather_object(None)

    def have_failed(self) -> bool:
        """Collective among workers that fail. Return, when all have called it, whether all may continue."""
        return True


@dataclass(frozen=True)
class WorkerPlace:
    """What this worker is in its job; an elastic job changes it, so it is read anew each time."""

    workers: Workers  # the job's workers
    # how many stages the model is split into, each on a worker of its own; 1 if it is not split
    stages: int = 1

    def __post_init__(self) -> None:
        size, stages = self.workers.size, self.stages
        if size % stages:
            raise ConfigError(
                f"stages {stages} divides the workers into replicas of {stages} each, and the job has {size} "
                f"worker{'s' * (size > 1)}",
                f"Start a multiple of {stages} workers, or choose a number of stages that divides theirs.",
                everywhere=True,
            )

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, to which each step's samples are sharded."""
        return self.workers.size // self.stages

    @property
    def replica(self) -> int:
        """The replica that this worker belongs to, from 0: it reads the samples of this replica."""
        return self.workers.rank // self.stages

    @property
    def stage(self) -> int:
        """The stage of a split model that this worker has, from 0."""
        return self.workers.rank % self.stages

    @property
    def is_first_stage(self) -> bool:
        """Whether it counts and reports what all workers of its replica read."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker computes loss and metrics."""
        return self.stage == self.stages - 1

    def describe(self) -> str:
        """Return this worker's place in a split model, as text."""
        of_replica = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage + 1} of {self.stages}{of_replica}"


def assert_consistent(workers: Workers, values: Mapping[str, Any], remedy: str = SAME_COMMAND) -> None:
    """Collective. Check that every worker has the same values."""
    if len(set(workers.allgather_object(digest_of(values)))) == 1:
        return
    texts = {name: repr(value) for name, value in values.items()}
    raise disagreement(workers.allgather_object((workers.host, texts)), remedy)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest that is equal if the values are."""
    texts = sorted((name, repr(value)) for name, value in values.items())
    return blake2b(repr(texts).encode(errors="backslashreplace"), digest_size=16).hexdigest()


def disagreement(everyone: Sequence[tuple[str, Mapping[str, str]]], remedy: str) -> AgreementError:
    """Return the error that says in what the workers differ, by host and values of each, in rank order."""
    names = sorted({name for _, values in everyone for name in values})
    lines = [line for name in names if (line := _difference(name, everyone))]
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return AgreementError(
        "the workers disagree before training:\n  " + "\n  ".join(lines[:_LINES] + more),
        remedy,
        everywhere=True,
    )


def _difference(name: str, everyone: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return who has which value, or an empty text if all have one; the commonest value first."""
    values = [values.get(name, "nothing") for _, values in everyone]
    if len(set(values)) == 1:
        return ""
    parts = []
    for value, count in Counter(values).most_common():
        rank = values.index(value)
        others = f" and {count - 1} more" if count > 1 else ""
        parts.append(f"{value} on rank {rank} ({everyone[rank][0]}){others}")
    return f"{name}: " + ", ".join(parts)


def run_on_rank_zero(workers: Workers, work: Callable[[], T], doing: str = "") -> T:
    """Collective. Do something on rank 0 only; return its result, of types that travel, on every worker."""
    outcome: T | HvdtrainError | None = None
    with waiting_for_rank_zero(workers, doing) if doing else nullcontext():
        if workers.rank == 0:
            try:
                outcome = work()
            except HvdtrainError as error:
                outcome = error
    outcome = workers.broadcast_object(outcome)
    if isinstance(outcome, HvdtrainError):
        outcome.everywhere = True
        raise outcome
    return cast(T, outcome)


@contextmanager
def waiting_for_rank_zero(workers: Workers, doing: str) -> Iterator[None]:
    """Collective. Return a context in which rank 0 may work for long; the other workers wait at its end."""
    with ACTIVITY.during(doing if workers.rank == 0 else f"waiting for rank 0, which is {doing}"):
        if workers.size == 1:
            yield
        elif workers.rank == 0:
            with _answering(workers):
                yield
        else:
            yield
            while not workers.broadcast_object(None):
                pass


@contextmanager
def _answering(workers: Workers) -> Iterator[None]:
    """Return a context in which a thread of rank 0 sends the others every few seconds that it is not over."""
    is_over, failures = threading.Event(), list[Exception]()

    def answer() -> None:
        try:
            while not workers.broadcast_object(is_over.wait(_ANSWER_SECONDS)):
                pass
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=answer, daemon=True, name="answer the other workers")
    thread.start()
    try:
        yield
    except BaseException:
        is_over.set()
        thread.join(_ANSWER_SECONDS)  # another worker may never answer
        raise
    is_over.set()
    thread.join()
    if failures:
        raise failures[0]
