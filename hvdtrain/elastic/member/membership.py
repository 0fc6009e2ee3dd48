"""A worker's membership in an elastic job: its connection to the driver, and the worlds that it enters."""

import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from hvdtrain import errors
from hvdtrain.elastic import messages
from hvdtrain.elastic.member.orders import Orders, failure_of, hello, sendable, value_texts
from hvdtrain.elastic.member.thread import (
    CONNECT_SECONDS,
    REGAINED_SECONDS,
    DriverConnection,
    Lease,
    MemberThread,
    open_connection,
)
from hvdtrain.elastic.watch.liveness import Told
from hvdtrain.host.hostfile import address_towards, interfaces, own_addresses
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import digest_of
from hvdtrain.workers.world import KEY_VARIABLE, TrainingPosition, World

_LOOPBACK = "127."


def interface_for(world: World) -> str:
    """Return the interface for Gloo's connections: loopback if all workers are on one host."""
    by_address = {
        text.partition("/")[0]: name for name, texts in interfaces(loopback=True).items() for text in texts
    }
    if world.one_host:
        return by_address.get(f"{_LOOPBACK}0.0.1", "lo")
    others = dict.fromkeys(member.host for member in world.members if member.host != world.host)
    for host in (world.store[0], *others):
        address = address_towards(host)
        if address in by_address and not address.startswith(_LOOPBACK):
            return by_address[address]
    return next(iter(own_addresses()), "lo")


_WELCOME_SECONDS = 30.0
_TELL_SECONDS = 2.0  # in which a worker joins only to report an error
_LAST_SECONDS = 2.0  # in which the last message is sent
_ANSWER_SECONDS = 1.0  # in which the driver says who reports an error
_INTERFACES = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
_CYCLE = "HOROVOD_CYCLE_TIME"
# milliseconds for which Horovod waits for more to reduce; alone, there is nothing to win by waiting
_CYCLE_ALONE, _CYCLE_OF_SEVERAL = "0.05", "1"

_current: list["Membership"] = []


class Membership:
    """A worker's part in an elastic job. Its methods are called by the training thread."""

    def __init__(
        self,
        connection: DriverConnection,
        welcome: messages.Welcome,
        environ: MutableMapping[str, str],
        *,
        stall_timeout: float,
        abort: Callable[[str], None],
    ) -> None:
        self.worker, self.job = welcome.worker, welcome.job
        self.slot, self.slots_on_host = welcome.slot, welcome.slots_on_host
        self.least, self.most = welcome.least, welcome.most
        self.is_joining = welcome.is_training
        self._environ, self._stall_timeout = environ, stall_timeout
        self._key = environ[KEY_VARIABLE]
        self._interfaces = [name for name in _INTERFACES if not environ.get(name)]
        self._sets_cycle = not environ.get(_CYCLE)
        self.orders = Orders(abort)  # what the driver wants of this worker
        self._lease = Lease(welcome.lease_seconds)
        self._thread = MemberThread(connection, self._lease, self.orders, stall_timeout)
        self._thread.say_ready = self._say_ready
        self._connection, self._pid = connection, os.getpid()
        self._ready: messages.Ready | None = None
        self._is_leaving = False

    @property
    def lost_lease(self) -> str:
        """Why this worker may no longer write files; empty while it may.

        A process that was stopped waits here until it knows whether the driver still counts on it. The thread
        that hears the driver does not wait for itself, and nobody waits for it for long: it may have ended.
        """
        until = time.monotonic() + REGAINED_SECONDS + 1.0
        while (
            self._lease.may_be_regained
            and not self._connection.is_closed
            and not self._thread.is_current
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        if not self._lease.is_lost:
            return ""
        return f"the launcher of this elastic job has not answered for {self._lease.silent_seconds:.0f} s"

    def on_end(self, end: Callable[[errors.JobEnded], None]) -> None:
        """Let a function, in another thread, end this process if the job ended and it does not notice."""
        self._thread.on_end = end

    def next_world(self, place: TrainingPosition, *, valid: bool, values: Mapping[str, Any]) -> World:
        """Leave the world behind, say that this worker is ready and wait for the next one."""
        self._ready = None  # from begin_waiting on, the other thread may say again where this stands
        generation = self.orders.begin_waiting()
        self._ready = messages.Ready(
            generation=generation,
            place=place,
            valid=valid,
            digest=digest_of(values),
            stall_timeout=self._stall_timeout,
            values={} if generation else value_texts(values),
        )
        self._thread.send(self._ready)
        with ACTIVITY.during("waiting for the other workers"):
            world = self.orders.wait()
        self._thread.is_leader = world.rank == 0
        return world

    def enter(self, world: World) -> None:
        """Set the environment with which Horovod enters a world."""
        if self.orders.broken:
            raise errors.PeerLostError(self.orders.broken, names_worker=True)
        self._environ.update(world.environment(self._key))
        if self._interfaces:
            interface = interface_for(world)
            self._environ.update(dict.fromkeys(self._interfaces, interface))
        if self._sets_cycle:
            self._environ[_CYCLE] = _CYCLE_ALONE if world.size == 1 else _CYCLE_OF_SEVERAL

    def formed(self) -> None:
        """Say that Horovod is up in the world."""
        self._thread.send(messages.Formed(generation=self.orders.generation))

    def form_failed(self, reason: str) -> None:
        """Say that Horovod did not come up in the world."""
        self._thread.send(messages.FormFailed(generation=self.orders.generation, reason=sendable(reason)))

    def synced(self, place: TrainingPosition, run_dir: str) -> None:
        """Say that this worker has the whole state of the world, which is written to a run directory."""
        self._thread.send(messages.Synced(generation=self.orders.generation, place=place, run_dir=run_dir))

    def leave(self, why: str) -> None:
        """Ask to leave the job at the next step boundary. A signal's handler may call it."""
        if not self._is_leaving:
            self._is_leaving = True
            self._thread.send(messages.Leaving(why=sendable(why)))

    def left(self) -> None:
        """Say that this worker has left and that its process ends.

        The connection stays to the end of the process: the driver kills a worker that it cannot hear.
        """
        if not self._thread.is_over:
            self._thread.send_last(messages.LeftWorld(), _LAST_SECONDS)

    def failed(self, error: BaseException) -> None:
        """Say that this worker ends because of an error, and wait for who reports it."""
        if self._thread.is_over or isinstance(error, errors.JobEnded | errors.RefusedError):
            return
        self.orders.is_ending = self._thread.is_over = True
        if self.orders.ended is None:
            failure = failure_of(error)
            self._thread.send_last(failure, _LAST_SECONDS)
            self.orders.wait_for_end(_ANSWER_SECONDS if failure.blame != "peer" else 0.0)

    def done(self, exit_code: int) -> None:
        """Say that training is complete, or stopped with its state saved."""
        if not self._thread.is_over:
            self._thread.send_last(messages.Done(exit_code=exit_code), _LAST_SECONDS)

    def explain(self) -> Told | None:
        """Return why a collective failed, as far as the driver said it."""
        why = self.orders.explain()
        return Told(why) if why else None

    def _say_ready(self) -> None:
        if self._ready is not None:
            self._ready = self._ready.model_copy(update={"generation": self.orders.generation})
            self._thread.send(self._ready)


def connect(
    environ: MutableMapping[str, str],
    *,
    stall_timeout: float,
    abort: Callable[[str], None],
    seconds: float = CONNECT_SECONDS,
) -> Membership:
    """Join the elastic job that started this process. Another thread calls ``abort``, maybe repeatedly."""
    if current() is not None:
        raise errors.UsageError(
            "a worker of an elastic job trains once, and this process trains a second time",
            "Start one job for each training.",
            everywhere=True,
        )
    connection = DriverConnection(open_connection(environ, seconds))
    connection.queue(hello(environ))
    try:
        welcome, more = _welcome(connection)
        client = Membership(connection, welcome, environ, stall_timeout=stall_timeout, abort=abort)
    except BaseException:
        connection.close()
        raise
    client._thread.start(more)
    _current[:] = [client]
    return client


def current() -> Membership | None:
    """Return the membership of this process; None if it is in no elastic job, or not connected."""
    # of a process that was forked it is another one's
    return next((client for client in _current if client._pid == os.getpid()), None)


def tell_driver(error: BaseException) -> BaseException:
    """Tell the driver of this worker's elastic job how the worker ends."""
    if isinstance(error, errors.JobEnded | errors.RefusedError):
        return error
    client = current()
    if client is None and isinstance(error, Exception):
        # joined only to report about an error before it: the job ends once, with this message, if all have it
        seconds = _TELL_SECONDS
        try:
            client = connect(os.environ, stall_timeout=seconds, abort=lambda why: None, seconds=seconds)
        except errors.JobEnded as end:
            return end  # another worker was faster, and has reported it
        except Exception:
            return error
    if client is None:
        return error
    if isinstance(error, errors.Removed):
        client.left()
    elif isinstance(error, errors.Stopped):
        client.done(errors.EXIT_STOPPED)
    else:
        client.failed(error)
        ended = client.orders.ended
        if ended is not None and not ended.speaks:
            return ended
    return error


def _welcome(connection: DriverConnection) -> tuple[messages.Welcome, Sequence[messages.FromDriver]]:
    """Send the first message; return the driver's answer to it, and what arrived after that."""
    until = time.monotonic() + _WELCOME_SECONDS
    while time.monotonic() < until and not connection.is_closed:
        connection.send()
        arrived = connection.receive()
        for number, message in enumerate(arrived):
            match message:
                case messages.Welcome():
                    return message, arrived[number + 1 :]
                case messages.Refuse(problem=problem, remedy=remedy):
                    raise errors.RefusedError(problem, remedy)
                case messages.End(problem=problem, remedy=remedy, exit_code=code, speaks=speaks):
                    raise errors.JobEnded(problem, remedy, exit_code=code, speaks=speaks)
        time.sleep(0.01)
    how = "ended the connection" if connection.is_closed else f"was silent for {_WELCOME_SECONDS:.0f} s"
    raise errors.EnvironmentFault(f"the driver of this elastic job {how}", "Its own output says more.")
