"""The two frameworks of one MPI job: which process runs which, and what they send each other."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from hvdtrain.errors import EnvironmentFault, ExchangeError, PeerLostError, UsageError
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.launches import SRUN, stated_launch
from hvdtrain.workers import wire

FIRST, SECOND = "torch", "tf"  # PyTorch has the lower half of the ranks
COMMAND = "horovodrun --mpi -np 2 python -m hvdtrain parity --task TASK"

_TAG = 61
_PART_BYTES = 1 << 28  # MPI counts in 32 bits
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Role:
    """What one process of the job does.

    Attributes:
        rank: its rank among all processes.
        size: number of all processes.
    """

    rank: int
    size: int

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
