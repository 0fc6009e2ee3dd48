"""One framework's side of the comparison, in the processes that run that framework."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from hvdtrain.backends.base import Backend
from hvdtrain.backends.records import PortableState
from hvdtrain.config import Config
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import (
    ENDINGS,
    NOT_THE_TASKS,
    EnvironmentFault,
    ExchangeError,
    HvdtrainError,
    PeerLostError,
    TaskError,
    UsageError,
)
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import SRUN, stated_launch
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.opening.setup import TaskData, build
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.session import Session
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.probe import in_fp64, make_probe, model_part, observe, try_out
from hvdtrain.workers import wire
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators
from hvdtrain.workers.user_errors import where_raised

FIRST, SECOND = "torch", "tf"  # PyTorch has the lower half of the ranks
COMMAND = "horovodrun --mpi -np 2 python -m hvdtrain parity --task TASK"

_TAG = 61
_PART_BYTES = 1 << 28  # MPI counts in 32 bits
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Role:
    """What one process of the job does."""

    rank: int  # its rank among all processes
    size: int  # number of all processes

    @property
    def framework(self) -> str:
        """The framework that it runs."""
        return FIRST if self.rank < self.size // 2 else SECOND

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the same framework."""
        half = self.size // 2
        return tuple(range(half) if self.framework == FIRST else range(half, self.size))

    @property
    def is_leader(self) -> bool:
        """Whether it speaks for its framework."""
        return self.rank == self.ranks[0]

    @property
    def other_leader(self) -> int:
        """The rank that speaks for the other framework."""
        return self.size // 2 if self.framework == FIRST else 0


def find_role(environ: Mapping[str, str] = os.environ) -> Role:
    """Return what this process does. No framework and no MPI is loaded.

    Raises:
        UsageError: If no launcher started an even number of processes over MPI.
        EnvironmentFault: If Horovod was built without MPI.
    """
    launch = stated_launch(environ)
    wanted = f"Start it as one MPI job, half of whose processes run PyTorch: {COMMAND}"
    if launch is None or launch.size == 1:
        raise UsageError(
            "parity runs PyTorch and TensorFlow side by side in one MPI job; this is a single process",
            wanted,
            everywhere=True,
        )
    is_mpi = launch.launcher == SRUN or any(name in launch.launcher for name in ("mpi", "PMIx"))
    if not is_mpi or environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        raise UsageError(
            "parity runs PyTorch and TensorFlow side by side in one MPI job; this job runs over Gloo, which "
            "has one world for all workers",
            wanted,
            everywhere=True,
        )
    if launch.size % 2:
        raise UsageError(
            "parity runs PyTorch in one half of the processes and TensorFlow in the other; "
            f"found {launch.size}",
            f"Start an even number: {COMMAND}",
            everywhere=True,
        )
    build = installed_build()
    if build is not None and build.patches and not build.mpi:
        raise EnvironmentFault(
            "Horovod was built without MPI, over which parity runs both frameworks in one job",
            "Install an MPI and run `python -m hvdtrain build-horovod --mpi require`.",
            everywhere=True,
        )
    return Role(launch.rank, launch.size)


class Exchange:
    """Messages between the leaders, over MPI; it polls, so that a signal can end it.

    Args:
        role: what this process does.

    Raises:
        EnvironmentFault: If mpi4py cannot be loaded, or belongs to another MPI.
    """

    def __init__(self, role: Role) -> None:
        try:
            self._mpi = import_module("mpi4py.MPI")  # after Horovod has started MPI
        except (ImportError, RuntimeError) as error:
            raise EnvironmentFault(
                f"mpi4py cannot be loaded: {error}", "Install it for the same MPI: pip install mpi4py."
            ) from None
        self._world = self._mpi.COMM_WORLD
        if self._world.Get_size() != role.size:
            raise EnvironmentFault(
                f"mpi4py sees {self._world.Get_size()} processes, the launcher started "
                f"{role.size}: it was built "
                "for another MPI than Horovod",
                "Install it anew for the same MPI: pip install --no-binary mpi4py --force-reinstall mpi4py.",
            )
        self._role = role

    def send(self, value: Any) -> None:
        """Send a value to the other framework's leader."""
        message = np.frombuffer(wire.encode(value), np.uint8)
        parts = [message[i : i + _PART_BYTES] for i in range(0, len(message), _PART_BYTES)]
        sizes = np.asarray([len(parts), len(message)], np.int64)
        for part in (sizes, *parts):
            self._wait(self._world.Isend([part, self._mpi.BYTE], self._role.other_leader, _TAG), "take")

    def receive(self) -> Any:
        """Return the value that the other framework's leader sends."""
        sizes = np.zeros(2, np.int64)
        self._receive_into(sizes)
        if not 0 <= sizes[1] <= int(sizes[0]) * _PART_BYTES:
            raise ExchangeError("the other framework sent what no worker of this version sends")
        message = np.empty(int(sizes[1]), np.uint8)
        for i in range(0, len(message), _PART_BYTES):
            self._receive_into(message[i : i + _PART_BYTES])
        return wire.decode(message.data, f"rank {self._role.other_leader}")

    def _receive_into(self, array: Any) -> None:
        request = self._world.Irecv([array, self._mpi.BYTE], self._role.other_leader, _TAG)
        self._wait(request, "send")

    def _wait(self, request: Any, doing: str) -> None:
        begun = time.monotonic()
        while not request.Test():
            if time.monotonic() - begun > _WAIT_SECONDS:
                raise PeerLostError(
                    f"rank {self._role.other_leader}, which runs the other framework, did not "
                    f"{doing} its part "
                    f"within {_WAIT_SECONDS:.0f} s",
                    "Use fewer --steps or a smaller model.",
                    names_worker=True,
                )
            time.sleep(_POLL_SECONDS)


T = TypeVar("T")

# fields that change how a step is done and not what it computes, or that a comparison leaves out
_LEFT_OUT: dict[str, Any] = {
    "compile": False, "checkpoint_activations": False, "profile": None, "resume": None, "sync_every": None,
    "shard": "none", "stages": 1, "stage_cuts": None,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One framework with the task's model."""

    config: Config  # the config, without what a comparison leaves out
    backend: Backend  # the framework
    task_data: TaskData  # the task with its data
    # whether training would start from what the model's own initializers give
    keeps_initial_values: bool = False

    def initial(self) -> PortableState:
        """Collective. Return the parameters that the model starts from; on ranks other than 0, nothing."""
        restore(self.config, self.backend, len(self.task_data.train_data))
        return self._parameters()

    def own_initial(self) -> PortableState:
        """Collective. Return the parameters that the model's own initializers give; nothing if not needed."""
        if not self.keeps_initial_values:
            return {}
        task = self.task_data.task
        build(self.config.model_copy(update={"initial_parameters": "model"}), task, self.backend)
        found = self._parameters()
        build(self.config, task, self.backend)
        return found

    def _parameters(self) -> PortableState:
        pending = self.backend.gather_state()
        return model_part({} if pending is None else pending.read())

    def observe(self, start: PortableState) -> Observation:
        """Collective. Load parameters, and return what the model does.

        Args:
            start: parameters that both frameworks have, on rank 0; not looked at on other ranks.

        Raises:
            TaskError: If the task's code fails.
        """
        return self._observe_or_fail(self.config, start)

    def observe_in_fp64(self, start: PortableState) -> Observation | str:
        """Collective. Return what the model does in fp64, or why it cannot, in words.

        Args:
            start: as ``observe`` takes it.

        Raises:
            TaskError: If the task's code fails in a step that several workers do together.
        """
        config = self.config.model_copy(update={"precision": "fp32"})
        workers = self.backend.workers
        with in_fp64(config.framework):
            ACTIVITY.enter("building the model in fp64", is_long=True)
            # one of several workers may fail alone, and the steps have collectives
            tried = _attempted(lambda: self._try_out(config, with_batch=workers.size > 1))
            if problems := [problem for problem in workers.allgather_object(tried) if problem]:
                return str(problems[0])
            if workers.size > 1:
                return self._observe_or_fail(config, start, is_fp64=True)
            return _attempted(lambda: self._observe(config, start, is_fp64=True))

    def _try_out(self, config: Config, *, with_batch: bool) -> None:
        """Build the model in fp64, and let it compute. Local: no collective."""
        build(config, self.task_data.task, self.backend)
        if not with_batch:
            return
        with self._session(config) as session:
            try_out(session, make_probe(self.backend, self.task_data.task, config))

    def _observe_or_fail(self, config: Config, start: PortableState, is_fp64: bool = False) -> Observation:
        try:
            return self._observe(config, start, is_fp64)
        except (*NOT_THE_TASKS, PeerLostError):
            raise
        except Exception as error:
            title = FRAMEWORKS[self.config.framework].title
            raise TaskError(
                f"the model or the loss of task {self.config.task} failed in {title}: {where_raised(error)}",
                "Train it in this framework first: --framework " + self.config.framework,
            ) from error

    def _observe(self, config: Config, start: PortableState, is_fp64: bool = False) -> Observation:
        pending = self.backend.gather_state()
        own = None if pending is None else pending.read()
        if own is not None:
            kept = {name: value for name, value in own.items() if name not in start or is_private_to(name)}
            own = kept | {name: start[name] for name in start if name in own}
        self.backend.scatter_state(own)
        seed_host_generators(config.seed, f"step 0, rank {self.backend.workers.rank}")
        with self._session(config) as session:
            probe = make_probe(self.backend, self.task_data.task, config)
            return observe(session, probe, is_fp64=is_fp64)

    @contextmanager
    def _session(self, config: Config) -> Iterator[Session]:
        task_data = replace(self.task_data, eval_data=None)
        with readers_for(config, task_data.train_data, None) as readers:
            yield new_session(config, self.backend, task_data, ResumePoint(), readers)


def _attempted(work: Callable[[], T]) -> T | str:
    """Return what work returns, or why it failed, in words."""
    try:
        return work()
    except (*ENDINGS, PeerLostError):
        raise
    except HvdtrainError as error:
        return error.problem.splitlines()[0]
    except Exception as error:
        return where_raised(error).splitlines()[0]


def is_private_to(name: str) -> bool:
    """Return whether an array is none of the model's."""
    return not name.startswith("model/")


def parity_config(config: Config) -> tuple[Config, list[str]]:
    """Return a config without what a comparison leaves out, and a note on what that is."""
    found = [name for name, value in _LEFT_OUT.items() if getattr(config, name) != value]
    notes = [f"left out of the comparison: {', '.join(found)}"] if found else []
    return config.model_copy(update=_LEFT_OUT), notes
