"""The workers of a job through Horovod, whichever framework's binding it is, and how it starts."""

import contextlib
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import (
    EXIT_ENVIRONMENT,
    EnvironmentFault,
    ExchangeError,
    HorovodBuildError,
    PeerLostError,
    TrainingError,
)
from hvdtrain.horovod_build.installed import BUILD_COMMAND, installed_build
from hvdtrain.host import start_reports
from hvdtrain.host.launcher import check_launch_is_seen, host_name, launched_rank, stated_launch
from hvdtrain.host.processes import deadline
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.world import World

_BINDINGS = ("horovod.torch.mpi_ops", "horovod.tensorflow.mpi_ops")
_MOST_CHARACTERS = 400


def abort_collectives(reason: str) -> None:
    """Let collectives, and ``hvd.init()``, fail within 50 ms until the next one; not over MPI. Local."""
    for abort in _abort_functions():
        abort(reason[:_MOST_CHARACTERS].encode(errors="replace"))


def _abort_functions() -> Iterator[Any]:
    """Yield the functions of the loaded Horovod libraries that give up collectives."""
    for name in _BINDINGS:
        if (binding := getattr(sys.modules.get(name), "_basics", None)) is None:
            continue
        try:
            yield binding.MPI_LIB_CTYPES.horovod_abort
        except AttributeError:
            raise HorovodBuildError(
                "the installed Horovod cannot give up collectives, which elastic jobs need",
                f"Build it again:\n  {BUILD_COMMAND} --force",
            ) from None


GATHER = -1  # in place of the root of a broadcast
_LENGTH = struct.Struct("<Q")  # of a message, before it


class Sized(Protocol):
    """What a sum over workers depends on: all workers of a job, or some of them, have it."""

    size: int


def group_of(workers: object) -> dict[str, Any]:
    """Return the arguments of Horovod's operations that make them those of some workers only."""
    process_set = getattr(workers, "process_set", None)
    return {} if process_set is None else {"process_set": process_set}


class HorovodWorkers(Workers):
    """Workers over an initialised Horovod binding, whose bytes ``collectives`` moves.

    Objects travel as ``wire.py`` encodes them. Horovod's own functions for objects are not used: they
    unpickle what other workers send, which executes code of the sender's choice.
    """

    def __init__(self, hvd: Any, collectives: Any, membership: Membership | None = None) -> None:
        self._hvd, self._collectives = hvd, collectives
        self._membership: Any = membership  # of the workers of an elastic job alone
        self.is_elastic = membership is not None
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        if (
            membership is not None
        ):  # alone before the first world, workers of one host share its GPUs and cores
            self.local_rank, self.local_size = membership.slot, membership.slots_on_host
        self.host = host_name()
        self.uses_mpi: bool = hvd.mpi_enabled()  # one worker may, too
        self.controller = "none" if self.size == 1 else "MPI" if self.uses_mpi else "Gloo"
        over = ", large sums over Gloo" if self.uses_mpi and hvd.gloo_enabled() else ""
        self.coordination = self.controller + over
        if (launch := stated_launch()) is not None:
            build = installed_build()
            check_launch_is_seen(launch, self.size, self.rank, (build and build.mpi) or "")
        self.least = membership.least if membership else self.size
        self.most = membership.most if membership else self.size

    def restart(self, world: World) -> None:
        """Collective. Enter a world of an elastic job: take rank and size anew."""
        self._hvd.shutdown()  # of the time alone before the first world
        self._membership.enter(world)
        try:
            self._hvd.init()
        except ValueError as error:
            problem = f"Horovod could not connect the {world.size} workers of this job"
            raise PeerLostError(problem, without_sources(error)) from error
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()
        if (self.rank, self.size) != (world.rank, world.size):
            raise EnvironmentFault(
                f"Horovod says rank {self.rank} of {self.size} where the launcher of the elastic job said "
                f"rank {world.rank} of {world.size}",
                "Horovod was initialised outside of hvdtrain: leave hvd.init() and hvd.shutdown() out.",
            )
        self.controller = self.coordination = "none" if self.size == 1 else "Gloo"

    def leave(self, *, broken: bool) -> None:
        """Leave the world of an elastic job: stop Horovod. Local if the world is broken."""
        if broken:
            abort_collectives("this worker leaves a world that lost a worker")
        self._hvd.shutdown()

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Collective. Return the root's value, which must be of types that travel, on every worker."""
        if self.size == 1:
            return value
        found = self._exchange(root, value if self.rank == root else None)[root]
        return value if self.rank == root else found

    def allgather_object(self, value: Any) -> list[Any]:
        """Collective. Return the values of all workers, in the order of ranks, on every worker."""
        return [value] if self.size == 1 else self._exchange(GATHER, value)

    def have_failed(self) -> bool:
        """Collective among workers that fail, under its own name. Return whether no operation is left."""
        if self.size == 1:
            return True
        is_under_way = np.array([self._collectives.is_under_way()], np.uint8)
        return not self._collectives.join(is_under_way, "hvdtrain.failed").any()

    def _exchange(self, purpose: int, value: Any) -> list[Any]:
        """Collective. Return the objects of all workers, in the order of ranks."""
        message = np.frombuffer(bytearray(packed(purpose, value)), np.uint8)  # writable, for PyTorch
        with peer_errors():
            joined = self._collectives.join(message)
        return unpacked(joined, self.size, purpose)


class peer_errors:  # noqa: N801 - used as a statement
    """Return a context in which the failure of a collective, in either binding, is a PeerLostError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception):
            return
        if _MISMATCH.search(str(error)):
            problem = f"the workers' collective operations do not match: {first_line(error)}"
            raise TrainingError(problem, _MATCH) from error
        kinds = {cls.__name__ for cls in type(error).__mro__}
        if "HorovodInternalError" in kinds or any(text in str(error) for text in _TEXTS):
            problem = "a collective operation failed because another worker ended"
            raise PeerLostError(problem, first_line(error)) from error


# texts of Horovod's native errors and of its transports, as they arrive through TensorFlow
_TEXTS = (
    "Horovod has been shut down",
    "HorovodInternalError",
    "Horovod background",
    "Horovod collectives aborted",
    "gloo/transport",
    " failed in Horovod: ",  # a call of MPI
)
# what Horovod says to all workers of operations that the workers request differently, or twice at a time
_MISMATCH = re.compile(
    r"Mismatched (?:data types|operations|\w+ tensor shapes|prescale and/or postscale factors"
    r"|reduction operation|\w+ root ranks|\w+ CPU/GPU device selection): "
    r"|a tensor with the same name as another tensor that is currently being processed"
)
_MATCH = (
    "Every worker has to do the same operations on tensors of the same shapes. Look for a branch of the "
    "task, its callbacks or its metrics that depends on the rank or on the worker's data."
)
# where in its source Gloo threw an exception
_SOURCE = re.compile(r"\[[^\[\]]*\.(?:cc|h):\d+\] ")


def without_sources(error: Exception) -> str:
    """Return the first line of an exception's text without the places in Gloo's source."""
    return _SOURCE.sub("", first_line(error))


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an exception's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def packed(purpose: int, value: Any) -> bytes:
    """Return a worker's object as bytes to send; of one that cannot travel, the error."""
    try:
        message = wire.encode((purpose, value, None))
    except Exception as error:
        if not isinstance(error, ExchangeError):
            error = ExchangeError(f"an object for the other workers cannot be encoded: {error!r}")
        message = wire.encode((purpose, None, error))
    return _LENGTH.pack(len(message)) + message


def unpacked(joined: NDArray[np.uint8], size: int, purpose: int) -> list[Any]:
    """Return the objects of all workers, in the order of ranks."""
    rest, values, failure = joined.data, [], None
    for rank in range(size):
        begin = _LENGTH.size
        length = _LENGTH.unpack_from(rest)[0] if len(rest) >= begin else 0
        if not 0 < length <= len(rest) - begin:
            raise _unexpected(rank, f"a message of {length:,} of {len(rest):,} bytes")
        message = wire.decode(rest[begin : begin + length], f"rank {rank}")
        rest = rest[begin + length :]
        if not isinstance(message, tuple) or len(message) != 3 or message[0] != purpose:
            found = _name(message[0]) if isinstance(message, tuple) and message else "another message"
            raise _unexpected(rank, f"{found} where this worker has {_name(purpose)}")
        values.append(message[1])
        if failure is None and (one := message[2]) is not None:
            failure = ExchangeError(f"{one.problem} (on rank {rank})", one.remedy, everywhere=True)
    if len(rest):
        raise _unexpected(size - 1, f"{len(rest):,} bytes too many")
    if failure is not None:
        raise failure
    return values


def _name(purpose: int) -> str:
    return "a gathering of objects" if purpose == GATHER else f"a broadcast from rank {purpose}"


def _unexpected(rank: int, found: str) -> ExchangeError:
    return ExchangeError(
        f"what arrived from rank {rank} is not what the workers exchange here: {found}",
        "Every worker must make the same calls in the same order, with the same version of hvdtrain. If they "
        "do, another program joined the job.",
    )


# So long a rank other than 0 waits before it speaks, per rank: the launcher ends it when another one has.
_SPEAK_AFTER_SECONDS, _MOST_SECONDS = 0.5, 4.0
_REMEDY = (
    "A worker is stopped or starved, still imports, or its host has no connection to the others; horovodrun "
    "names it.\n  Or the hosts have different builds of Horovod: `python -m hvdtrain doctor` compares them.\n"
    "  `horovodrun --start-timeout SECONDS`, or the variable HOROVOD_START_TIMEOUT with other "
    "launchers, waits longer."
)
_ALONE = (
    "A worker without a launcher connects to itself at 127.0.0.1: bring up the loopback interface, for "
    "example with `ip link set lo up`."
)
_ended: list[str] = []  # "MPI" if Horovod has ended over it, which starts once in a process


def forbid_restart(workers: object) -> None:
    """Note that Horovod has ended, if that was over MPI."""
    if isinstance(workers, HorovodWorkers) and workers.uses_mpi:
        _ended.append("MPI")


def start_horovod(
    hvd: Any, collectives: Any, membership: Membership | None = None, *, has_groups: bool = False
) -> HorovodWorkers:
    """Collective. Start Horovod. MPI would wait for ever, so the process ends when time is over."""
    if _ended:
        raise EnvironmentFault(
            "Horovod has ended in this process, after an error that not all workers had, and over MPI it "
            "starts once",
            "Start the job again.",
        )
    if membership is not None:
        list(_abort_functions())  # checks that collectives can be given up
    rank, seconds = launched_rank(), start_reports.start_limit()
    try:
        with contextlib.ExitStack() as stack:
            if rank is not None:
                stack.enter_context(deadline(seconds, lambda: _give_up(rank, seconds)))
                start_reports.report_begin(rank)
                stack.enter_context(start_reports.reported_start(rank))
            options = {"process_sets": "dynamic"} if has_groups else {}
            hvd.init(**options)
    except ValueError as error:
        remedy = _ALONE if rank is None and membership is None else _REMEDY
        raise EnvironmentFault(f"Horovod could not start: {without_sources(error)}", remedy) from error
    return HorovodWorkers(hvd, collectives, membership)


def _give_up(rank: int, seconds: float) -> None:
    launch = stated_launch()
    count = f"the {launch.size} workers" if launch is not None and launch.size > 1 else "the workers"
    stopped = start_reports.stopped_workers()
    if rank:
        time.sleep(min(_SPEAK_AFTER_SECONDS * (rank + 1), _MOST_SECONDS))
    here = f"; stopped on this host: {', '.join(stopped)}" if stopped else ""
    with contextlib.suppress(OSError):
        print(
            f"hvdtrain: rank {rank} on {socket.gethostname()}: not all of {count} started Horovod within "
            f"{seconds:g} s{here}\n  {_REMEDY}",
            file=sys.stderr,
            flush=True,
        )
    start_reports.exit_at_once(EXIT_ENVIRONMENT)
