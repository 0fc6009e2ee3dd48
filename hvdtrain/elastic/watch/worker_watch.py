"""Watch the workers of a job, so that none waits without limit for one that does not answer.

Each worker keeps a connection to rank 0, over which a thread reports about once a second what its training
thread does; rank 0 answers with the same. The thread needs neither Horovod nor MPI, so it notices a process
that is stopped, a training thread that makes no progress, a process that ended without a word and, by TCP
keepalive, a host that lost power or network. What is noticed is an event; what is done about it is not
decided here.
"""

import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import astuple

import psutil

from hvdtrain.elastic.watch import liveness
from hvdtrain.host.processes import start_group
from hvdtrain.workers.activity import ACTIVITY, ActivityMark
from hvdtrain.workers.agreement import Workers

_NOTICES_SECONDS = 0.5  # in which the training thread notices that a process ended, over Gloo
_SPEAKS_ALONE_SECONDS = 5.0  # in which a launcher ends the others
_BETWEEN_SPEAKERS_SECONDS = 0.3
_SPEAKER_SECONDS = 12.0  # in which it writes a checkpoint to its end, and the summary
_KILL_AFTER_SECONDS = 1.0
_STACK_SECONDS = 2.0
_UNREPORTED_SECONDS = 0.5
_NAMED_AS_SILENT_SECONDS = 10.0


def watch_workers(
    workers: Workers, limits: liveness.WatchLimits, on_event: liveness.OnEvent
) -> tuple["WorkerWatch", str]:
    """Collective. Start to watch the workers; return the watch, and a text that names those without one."""
    if workers.size == 1:
        return WorkerWatch(liveness.Member(0, workers.host), [], {}, limits=limits, on_event=on_event), ""
    members = liveness.gather_members(workers)
    limits = liveness.WatchLimits(*workers.broadcast_object(astuple(limits)))
    connections, unwatched = liveness.connect_workers(workers, members, limits.silence_seconds)
    watch = WorkerWatch(
        members[workers.rank],
        members,
        connections,
        limits=limits,
        on_event=on_event,
        collectives_fail=workers.controller != "MPI",
    )
    if not unwatched:
        return watch, ""
    return watch, (
        f"cannot watch {', '.join(map(str, unwatched))}: no connection to {members[0].host} other than "
        "Horovod's own; if one of them does not answer, the job may wait for it without limit"
    )


class WorkerWatch:
    """A thread that sends heartbeats, reads those of others, and judges them."""

    def __init__(
        self,
        own: liveness.Member,
        members: Collection[liveness.Member],
        connections: Mapping[socket.socket, liveness.Member],
        *,
        limits: liveness.WatchLimits,
        on_event: liveness.OnEvent,
        mark: ActivityMark = ACTIVITY,
        collectives_fail: bool = True,
    ) -> None:
        self._own, self._members, self._limits = own, members, limits
        self._collectives_fail = collectives_fail
        self._on_event, self._mark = on_event, mark
        self._peers = [liveness.Peer(connection, member) for connection, member in connections.items()]
        self._liveness = liveness.Liveness(
            own, list(connections.values()), limits.stall_timeout, time.monotonic()
        )
        self._wake, self._woken = socket.socketpair()
        self._is_closing, self._noticed = threading.Event(), threading.Event()
        self._gone: liveness.Left | liveness.Told | None = None  # why a collective may fail
        self._somebody_spoke = self._is_over = False
        self._stacks: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        if self._peers:
            self._thread = threading.Thread(target=self._run, daemon=True, name="watch workers")
            self._thread.start()

    def close(self) -> None:
        """Say goodbye and stop watching."""
        self._is_closing.set()
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for peer in self._peers:
            peer.send({"goodbye": True}, must_arrive=True)
            peer.receive()  # closing with something unread would be an error at the other end
            peer.connection.close()
        self._woken.close()

    def explain(self) -> liveness.WatchEvent | None:
        """Return why a collective failed, as far as it is known; None if the worker that failed has spoken.

        It is called by the training thread, which may know of the failure a moment before the watch does.
        """
        if self._thread is None or self._somebody_spoke:
            return None
        self._noticed.wait(_UNREPORTED_SECONDS)
        if self._somebody_spoke or self._gone:
            return self._gone
        return self._liveness.judge_silence(time.monotonic(), _NAMED_AS_SILENT_SECONDS)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            turned, next_beat = time.monotonic(), time.monotonic()
            while not self._is_closing.is_set():
                selector.select(max(0.0, next_beat - time.monotonic()))
                if self._is_closing.is_set():
                    return
                now, before = time.monotonic(), turned
                turned = now
                was_stopped = bool(self._limits.stall_timeout) and now - before > max(
                    3 * liveness.BEAT_SECONDS, self._limits.stall_timeout / 2
                )
                if was_stopped:
                    self._liveness.forgive(now)
                if now >= next_beat:
                    next_beat = now + liveness.BEAT_SECONDS
                    self._send_beats(now)
                event = self._read(selector, now)
                if was_stopped and event is not None:
                    event = liveness.Abandoned()
                if event := event or self._judge(now):
                    self._report(event)
                    return

    def _judge(self, now_seconds: float) -> liveness.WatchEvent | None:
        if self._is_over:
            return None
        if self._own.rank:  # it only hears rank 0
            return self._liveness.judge_silence(now_seconds)
        return self._liveness.judge(liveness.state_of(self._mark), now_seconds)

    def _send_beats(self, now_seconds: float) -> None:
        beat = {"state": list(liveness.state_of(self._mark))}
        for peer in self._peers:
            is_tenth = int(now_seconds / liveness.BEAT_SECONDS) % 10 == 0
            is_silent = self._liveness.is_silent(peer.member.rank, now_seconds)
            # what a stopped process does not read must not fill its connection
            if not peer.is_closed and (is_tenth or not is_silent):
                peer.send(beat)

    def _read(self, selector: selectors.BaseSelector, now_seconds: float) -> liveness.WatchEvent | None:
        """Take note of what has arrived; return what is wrong, if something is."""
        for peer in [peer for peer in self._peers if not peer.is_closed]:
            for message in peer.receive():
                if event := self._take(peer, message, now_seconds):
                    return event
            if peer.is_closed:
                selector.unregister(peer.connection)
                if event := self._closed(peer):
                    return event
        return None

    def _take(
        self, peer: liveness.Peer, message: Mapping[str, object], now_seconds: float
    ) -> liveness.WatchEvent | None:
        if state := liveness.read_state(message.get("state")):
            self._liveness.beat(peer.member.rank, state, now_seconds)
        if "goodbye" in message:
            self._somebody_spoke = True
            self._noticed.set()
            self._liveness.drop(peer.member.rank)
        if "stack?" in message:
            peer.send({"stack": self._mark.stack()[-(1 << 16) :]}, must_arrive=True)
        if "stack" in message:
            self._stacks[peer.member.rank] = str(message["stack"])
        if "gone" in message:  # rank 0 says it, or its training thread does
            self._gone, self._is_over = liveness.Told(str(message["gone"])), True
            self._noticed.set()
        if "end" in message:
            self._gone = liveness.Told(str(message["end"]))
            self._noticed.set()
            self._kill_stopped(message.get("stopped"))
            return self._gone
        return None

    def _closed(self, peer: liveness.Peer) -> liveness.WatchEvent | None:
        """Return what the end of a connection means."""
        if peer.is_unreachable:
            host = liveness.describe_host(peer.member.rank, self._members)
            return liveness.HostLost(
                f"{host} is gone: it has not answered for {self._limits.silence_seconds} s"
            )
        left = self._liveness.left(peer.member.rank)
        if left is not None:
            self._gone = left
            self._noticed.set()
        return left

    def _report(self, event: liveness.WatchEvent) -> None:
        """Let this worker and the others end; the watch is over."""
        if isinstance(event, liveness.Left):
            self._send_all({"gone": event.problem})
            if self._collectives_fail and self._is_closing.wait(_NOTICES_SECONDS):
                return  # the training thread has noticed, and speaks
        if self._own.rank >= 2 and isinstance(event, liveness.Silent | liveness.Stalled | liveness.Left):
            # rank 1 says that rank 0 is gone, and the launcher ends the others; without it another says it
            turn_seconds = _SPEAKS_ALONE_SECONDS + min(3.0, _BETWEEN_SPEAKERS_SECONDS * (self._own.rank - 2))
            if self._is_closing.wait(turn_seconds):
                return
        stacks = self._ask_for_stacks(event) if isinstance(event, liveness.Stalled) else ""
        stopped = list(event.ranks) if isinstance(event, liveness.Silent) else []
        if isinstance(event, liveness.Told):
            self._wait_for_speaker()
        elif not isinstance(event, liveness.Abandoned):
            self._send_all({"end": event.problem, "stopped": stopped})
        self._kill_stopped(stopped)  # in a moment
        self._on_event(event, stacks)

    def _send_all(self, message: dict[str, object]) -> None:
        for peer in self._peers:
            if not peer.is_closed:
                peer.send(message, must_arrive=True)

    def _wait_for_speaker(self) -> None:
        """Wait until the worker that ends the job has ended: it may still write its summary."""
        until = time.monotonic() + _SPEAKER_SECONDS
        while time.monotonic() < until and not self._is_closing.is_set():
            if all(peer.is_closed for peer in self._peers):
                return
            for peer in self._peers:
                peer.receive()
            self._is_closing.wait(0.05)

    def _ask_for_stacks(self, event: liveness.Stalled) -> str:
        """Return the Python stacks of the workers that stalled, as far as they answer in time."""
        if not self._limits.shows_stacks:
            return ""
        wanted = set(event.ranks or [member.rank for member in self._members])
        if self._own.rank in wanted:
            self._stacks[self._own.rank] = self._mark.stack()
        asked = [peer for peer in self._peers if peer.member.rank in wanted and not peer.is_closed]
        for peer in asked:
            peer.send({"stack?": True}, must_arrive=True)
        until = time.monotonic() + _STACK_SECONDS
        while not wanted <= self._stacks.keys() and time.monotonic() < until:
            for peer in asked:
                for message in peer.receive():
                    self._take(peer, message, time.monotonic())
            self._is_closing.wait(0.05)
        members = {member.rank: member for member in self._members}
        return "".join(f"{members[rank]}:\n{self._stacks[rank]}" for rank in sorted(self._stacks))

    def _kill_stopped(self, ranks: object) -> None:
        """Kill processes that are stopped, if they run on this host: they must not wake up into the end."""
        for member in self._members:
            if not isinstance(ranks, list) or member.rank not in ranks or member.rank == self._own.rank:
                continue
            if member.pid and member.shares_host(self._own):
                with suppress(psutil.Error, OSError):
                    if psutil.Process(member.pid).create_time() == member.process_seconds:
                        # later, so that the launcher takes the exit code of the worker that speaks
                        words = ["sh", "-c", f"sleep {_KILL_AFTER_SECONDS}; kill -KILL {member.pid}"]
                        start_group(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
