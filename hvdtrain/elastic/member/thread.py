"""The thread of an elastic job's worker that beats, takes the driver's orders, and ends what hangs."""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hvdtrain.elastic import messages
from hvdtrain.elastic.links import LineConnection, connect
from hvdtrain.elastic.member.orders import Orders, sendable
from hvdtrain.elastic.watch.liveness import BEAT_SECONDS, silence_seconds, state_of
from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault, JobEnded
from hvdtrain.host.launcher import ELASTIC_VARIABLE, WORKER_VARIABLE, host_name
from hvdtrain.host.processes import kill_if_same
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.world import KEY_VARIABLE

_PAUSE_SECONDS = 3.0  # a thread that turns once a second and was away for longer was stopped, or starved
_FRESH_SECONDS = 2.0  # what arrives so long after that was not sent while it was away
REGAINED_SECONDS = 4.0  # in which a driver that is there renews the lease of a worker that was stopped


def boot_seconds() -> float:
    """Return the seconds since the host started; they continue while it is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no such clock
    return time.clock_gettime(clock)


class Lease:
    """The time for which the driver counts on this worker: it gives its place to nobody before it is over.

    A process that was stopped finds messages that arrived meanwhile: they do not say that the driver still
    counts on it, so they renew nothing.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = boot_seconds) -> None:
        self.seconds, self._clock = seconds, clock
        self._heard = self._turned = self._clock()
        self._back = self._heard - REGAINED_SECONDS  # when this process last ran again after it was stopped

    def turn(self) -> None:
        """Note that this process runs; called more than once in three seconds."""
        now = self._clock()
        if now - self._turned > _PAUSE_SECONDS:
            self._back = now
        self._turned = now

    def renew(self) -> None:
        """Take note that the driver was heard."""
        self.turn()
        if self._turned - self._back >= _FRESH_SECONDS:
            self._heard = self._turned

    @property
    def silent_seconds(self) -> float:
        """How long the driver has not been heard."""
        return self._clock() - self._heard

    @property
    def is_lost(self) -> bool:
        """Whether the lease has run out."""
        return self.silent_seconds > self.seconds

    @property
    def was_stopped(self) -> bool:
        """Whether this process was stopped or starved a moment ago, so that it may have missed its end."""
        return self._clock() - self._back < REGAINED_SECONDS

    @property
    def may_be_regained(self) -> bool:
        """Whether the lease has run out, and this process may hear the driver in a moment."""
        now = self._clock()
        since = now if now - self._turned > _PAUSE_SECONDS else max(self._back, self._heard + self.seconds)
        return self.is_lost and now - since < REGAINED_SECONDS


CONNECT_SECONDS = 20.0  # for all addresses together; the driver listens before it starts a worker


class DriverConnection(LineConnection):
    """A connection over which messages go both ways. Only ``queue`` may be called by any thread."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, messages.MAX_LINE_BYTES)
        self._queue: deque[bytes] = deque()

    @property
    def is_sending(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._queue or self.has_unsent) and not self.is_closed

    def queue(self, message: messages.FromWorker) -> None:
        """Let a message be sent by the next ``send``."""
        self._queue.append(messages.encode(message))

    def send(self) -> None:
        """Send what is queued, as far as that does not wait."""
        while self._queue:
            self._outgoing += self._queue.popleft()
        self.flush()

    def receive(self) -> list[messages.FromDriver]:
        """Return the messages that have arrived. It does not wait; what is no message is dropped."""
        return [message for line in self.receive_lines() if (message := messages.from_driver(line))]

    def close(self) -> None:
        """End the connection."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a process that was forked may have it, too
        self.connection.close()


def open_connection(environ: Mapping[str, str], seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Connect to the driver at the first of its addresses that answers as the job's driver."""
    text, key = environ.get(ELASTIC_VARIABLE, ""), environ.get(KEY_VARIABLE, "")
    # host and port of each, as in "10.0.0.1:4000,10.1.0.1:4000"
    parts = [part.strip().rpartition(":") for part in text.split(",")]
    addresses = [(host, int(port)) for host, _, port in parts if host and port.isdecimal()]
    if not addresses or not key:
        found = f"{ELASTIC_VARIABLE}={text!r}" if not addresses else f"{KEY_VARIABLE} is not set"
        raise EnvironmentFault(
            f"this process is a worker of an elastic job, and does not know its driver: {found}",
            f"horovodrun --min-np sets both. Unset {ELASTIC_VARIABLE} for a job that is not elastic.",
        )
    try:
        return connect(addresses, key, environ.get(WORKER_VARIABLE, ""), seconds, silence_seconds())
    except ConnectionError as error:
        raise EnvironmentFault(
            f"host {host_name(environ)} cannot connect to the driver of its elastic job ({error})",
            "Hosts of a job must reach the host of the launcher on all ports; its --network-interfaces "
            "option chooses the network.",
        ) from None


# The training thread ends the process in order if it can: so long it has to notice that the job has ended,
_NOTICE_SECONDS = 5.0
_NOTICE_ALONE_SECONDS = 1.0  # less before its first world: there is nothing to save
_END_SECONDS = 40.0  # and so long to end, with a save that is under way
_GONE = "the launcher, which leads this elastic job, has ended or cannot be reached"
_REMEDY = "Continue from the newest checkpoint with --resume."


class MemberThread:
    """A thread that talks with the driver while the training thread computes or waits."""

    def __init__(
        self, connection: DriverConnection, lease: Lease, orders: Orders, stall_timeout: float
    ) -> None:
        self._connection, self._lease, self._orders = connection, lease, orders
        self._stall_timeout = stall_timeout
        # called to end this process, whose training thread does not; it may write down how it stood
        self.on_end: Callable[[JobEnded], None] = end_process
        self.is_leader = True  # whether this worker reports what happens to all, such as the launcher's end
        self.is_over = False  # whether this worker has said how it ends
        self.say_ready: Callable[[], None] = lambda: None
        self._ended_at: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="member")

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def start(self, arrived: Sequence[messages.FromDriver] = ()) -> None:
        """Start the thread, which takes these messages first."""
        for message in arrived:
            self._take(message)
        self._thread.start()

    def send(self, message: messages.FromWorker) -> None:
        """Send a message. It does not wait, and a signal's handler may call it."""
        self._connection.queue(message)
        with suppress(OSError):  # woken already, or over
            self._wake.send(b"x")

    def send_last(self, message: messages.FromWorker, seconds: float) -> None:
        """Send the message that says how this worker ends, and wait until it is on its way."""
        self.is_over = True
        self.send(message)
        until = time.monotonic() + seconds
        while self._connection.is_sending and time.monotonic() < until:
            time.sleep(0.01)

    def _run(self) -> None:
        try:
            self._talk()
        except Exception:
            traceback.print_exc()  # without this thread the driver takes the worker for stopped
        if not self.is_over:
            self._lost()

    def _talk(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._connection.connection, selectors.EVENT_READ)
            next_beat = time.monotonic()
            while not self._connection.is_closed:
                self._connection.send()
                selector.select(max(0.0, next_beat - time.monotonic()))
                with suppress(OSError):
                    self._woken.recv(4096)
                if self._connection.is_closed:
                    break
                self._read()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._beat()

    def _read(self) -> None:
        """Take what has arrived. If the connection has ended, its last messages renew nothing."""
        arrived = self._connection.receive()
        self._lease.turn()
        for message in arrived:
            if not self._connection.is_closed:
                self._lease.renew()
            self._take(message)

    def _take(self, message: messages.FromDriver) -> None:
        match message:
            case messages.KillProcess(pid=pid, process_seconds=seconds):
                kill_if_same(pid, seconds)
            case _ if self._orders.take(message):
                self.say_ready()

    def _beat(self) -> None:
        if not self._connection.is_sending:  # a driver that does not read gets no more than one
            name, *numbers, user_code = state_of(ACTIVITY)
            self._connection.queue(messages.Beat(state=[sendable(name), *numbers, sendable(user_code)]))
        self._orders.repeat_abort()
        if self._lease.is_lost and not self.is_over and not self._lease.may_be_regained:
            silent = f"the launcher has not answered for {self._lease.silent_seconds:.0f} s"
            self._orders.give_up(silent)
            if 0 < self._stall_timeout <= self._lease.silent_seconds:
                self._orders.end(JobEnded(f"{silent}: stopped or starved, or cut off", _REMEDY, speaks=True))
        if self._orders.ended is not None and not self.is_over:
            self._end_in_time(self._orders.ended)

    def _end_in_time(self, error: JobEnded) -> None:
        """End the process if the training thread does not do so in time."""
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        notice_seconds = _NOTICE_SECONDS if self._orders.generation else _NOTICE_ALONE_SECONDS
        if now - self._ended_at >= (_END_SECONDS if self._orders.is_ending else notice_seconds):
            self.on_end(error)

    def _lost(self) -> None:
        """End the job for this worker: the connection has ended."""
        if self._lease.is_lost or self._lease.was_stopped:
            # the others may have gone on without it: it must write nothing
            os._exit(EXIT_ENVIRONMENT)
        self._orders.end(JobEnded(_GONE, _REMEDY, speaks=self.is_leader))
        while not self.is_over:
            self._orders.repeat_abort()
            self._end_in_time(self._orders.ended or JobEnded(_GONE, _REMEDY))
            time.sleep(BEAT_SECONDS / 4)


def end_process(error: JobEnded) -> None:
    """Report how the job ended, if this worker does that, and end this process."""
    if error.speaks:
        remedy = f"  {error.remedy}\n" if error.remedy else ""
        with suppress(OSError, ValueError):
            print(f"hvdtrain: {error.problem}\n{remedy}", end="", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
