"""The driver of an elastic job: it listens to the workers, lets ``Members`` decide, and does what it says."""

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.elastic import messages
from hvdtrain.elastic.driver import records
from hvdtrain.elastic.driver.membership import Members
from hvdtrain.elastic.driver.worlds import State
from hvdtrain.elastic.links import Link, Links
from hvdtrain.elastic.watch.liveness import BEAT_SECONDS
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.workers.world import World, world_key

if TYPE_CHECKING:  # they need Horovod
    from hvdtrain.elastic.driver.clusters import HostCluster, WorkerProcess, WorldStore

STATE_VARIABLE = "HVDTRAIN_ELASTIC_STATE"
_FAR_SECONDS = 1.0  # after which a process that was killed, and is still there, is looked for on its host
_STOPPED_SECONDS = 3 * BEAT_SECONDS  # a turn of the loop that takes so much longer: this process was stopped
_KILLED_SECONDS = 10.0
_TURN_SECONDS = 0.1  # after which the loop looks at what is due


@dataclass
class _Known:
    """A worker that was started."""

    slot: records.Slot
    process: "WorkerProcess | None" = None  # None if it could not be started
    has_exited: bool = False
    link: Link | None = None  # while it is connected
    hello: messages.Hello | None = None
    look_at: float = float("inf")  # when to look for it on its host, once it was killed

    @property
    def running(self) -> "WorkerProcess | None":
        """The process that started it here, while that runs."""
        return None if self.has_exited else self.process

    @property
    def is_there(self) -> bool:
        """Whether it may still be there."""
        return self.link is not None or self.running is not None


class Driver:
    """Runs an elastic job."""

    def __init__(
        self,
        limits: records.Limits,
        cluster: "HostCluster",
        job_key: str,
        *,
        command: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._limits, self._cluster, self._key = limits, cluster, job_key
        self._links = Links(cluster.listen_on, job_key, limits.silence_seconds)
        cluster.addresses = self._links.addresses
        self._members = Members(limits, time.monotonic(), job=secrets.token_hex(8), command=command)
        self._events: deque[records.Event] = deque()  # from other threads and signal handlers, too
        self._workers: dict[str, _Known] = {}
        self._hosts: Sequence[HostSlots] = ()
        self._store: WorldStore | None = None
        self._finish: records.Finish | None = None
        self._state_file, self._state = environ.get(STATE_VARIABLE, ""), ""
        self._next_beat = time.monotonic()

    def signal(self, number: int) -> None:
        """Let all workers save and stop; the second time, end them. A signal handler may call it."""
        self._events.append(records.Signalled(number))
        self._links.wake()

    def run(self) -> records.Finish:
        """Run the job to its end, and return how it ended. Whatever happens, all workers are ended."""
        try:
            self._run()
            assert self._finish is not None
            self._await_ends(self._finish.grace_seconds)
            return self._finish
        finally:
            self._end_all()

    # the loop

    def _run(self) -> None:
        turned = time.monotonic()
        while self._finish is None:
            if (hosts := tuple(self._cluster.hosts())) != self._hosts:
                self._hosts = hosts
                self._take(records.Discovered(hosts))
            received = self._links.wait(0.0 if self._events else _TURN_SECONDS)
            now = time.monotonic()
            if now - turned > _STOPPED_SECONDS:
                self._take(records.Tick(now - turned))
            turned = now
            self._beat(now)
            self._receive(received)
            while self._events and self._finish is None:
                self._take(self._events.popleft())
            self._take(records.Tick())
            self._look_far(now)
            if self._state_file:  # a snapshot of many workers takes its time
                self._write_state(self._members.state, self._members.snapshot())

    def _take(self, event: records.Event) -> None:
        for action in self._members.take(event, time.monotonic()):
            self._act(action)

    def _beat(self, now: float) -> None:
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_SECONDS
        for name, one in self._workers.items():
            if one.link is not None and self._members.hears(name):
                one.link.send(messages.DriverBeat(), may_drop=True)

    def _receive(self, received: Sequence[tuple[Link, bytes]]) -> None:
        for link, line in received:
            message = messages.from_worker(line)
            if message is None or (link.worker and isinstance(message, messages.Hello)):
                continue
            if link.worker:
                self._take(records.Heard(link.worker, message))
            elif isinstance(message, messages.Hello):
                self._arrive(link, message)
            else:
                self._links.close(link)
        for link in self._links.closed():
            if link.worker:
                self._workers[link.worker].link = None
                self._take(records.Lost(link.worker, link.is_unreachable))

    def _arrive(self, link: Link, hello: messages.Hello) -> None:
        """Let a worker in, if it is one that was started."""
        name = link.claimed
        if self._finish is None and self._members.admits(name):
            link.worker = name
            self._workers[name].link, self._workers[name].hello = link, hello
            self._take(records.Arrived(name, hello))
            return
        if self._finish is not None:  # another worker says what ended the job, or this process does
            link.send(messages.End(problem=self._finish.problem, exit_code=self._finish.exit_code))
        else:
            problem = f"the job expects no worker of the name {name!r}: it was given up, or is there already"
            link.send(messages.Refuse(problem=problem))
        self._links.close(link)

    # actions

    def _act(self, action: records.Action) -> None:
        match action:
            case records.Start(worker, slot):
                self._start(worker, slot)
            case records.Send(worker, message):
                self._send(worker, message)
            case records.Kill(worker):
                self._kill(self._workers[worker])
            case records.Forward(worker, number):
                if process := self._workers[worker].running:
                    process.signal(number)
            case records.OpenWorld(worlds):
                self._open(worlds)
            case records.CloseStore():
                self._close_store()
            case records.Say(text):
                self._cluster.say(text)
            case records.Finish():
                self._finish = action

    def _start(self, worker: str, slot: records.Slot) -> None:
        one = self._workers[worker] = _Known(slot)

        def on_exit(code: int) -> None:
            one.has_exited = True
            self._events.append(records.Exited(worker, code))
            self._links.wake()

        try:
            one.process = self._cluster.start(worker, slot, on_exit)
        except OSError as error:
            self._cluster.say(f"cannot start a worker on {slot}: {error}")
            self._events.append(records.Exited(worker, records.SSH_FAILED))  # which is no crash of the worker

    def _send(self, worker: str, message: messages.FromDriver) -> None:
        if (link := self._workers[worker].link) is not None:
            link.send(message)

    def _open(self, worlds: Sequence[World]) -> None:
        """Open a store for a world, and tell its members all that only they may know."""
        self._close_store()
        salt = secrets.token_hex(16)
        generation = worlds[0].generation
        try:
            self._store = self._cluster.open_store(world_key(self._key, generation, salt))
        except OSError as error:
            self._events.append(records.StoreFailed(str(error)))
            return
        for world in worlds:
            store = (self._cluster.address_for(world.host), self._store.port)
            entered = world.model_copy(update={"store": store, "salt": salt})
            self._send(world.members[world.rank].worker, messages.EnterWorld(world=entered))

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    # the ends of workers

    def _kill(self, worker: _Known) -> None:
        """Kill a worker: through its launcher, by the other workers of its host, and then from afar."""
        if process := worker.running:
            process.kill()
        hello = worker.hello
        if hello is None or not worker.is_there:
            return
        order = messages.KillProcess(pid=hello.pid, process_seconds=hello.process_seconds)
        for other in self._workers.values():
            is_near = other.hello and (other.hello.host, other.hello.machine) == (hello.host, hello.machine)
            if other is not worker and other.link is not None and is_near:
                other.link.send(order)
        worker.look_at = min(worker.look_at, time.monotonic() + _FAR_SECONDS)

    def _look_far(self, now: float) -> None:
        """Kill workers that do not end from afar: their launcher's process here is not the worker."""
        for worker in [one for one in self._workers.values() if now >= one.look_at]:
            worker.look_at = float("inf")
            if worker.is_there and (hello := worker.hello) is not None:
                self._cluster.kill_far(worker.slot.host, hello.pid, hello.process_seconds)

    def _left(self) -> list[_Known]:
        """Return the workers that may still be there."""
        return [one for one in self._workers.values() if one.is_there]

    def _await_ends(self, seconds: float) -> None:
        """Wait until all workers have ended by themselves; a second signal ends the wait.

        They still get beats: without these they would not end a checkpoint that they write.
        """
        until = time.monotonic() + seconds
        while self._left() and (now := time.monotonic()) < until:
            self._beat(now)
            self._receive(self._links.wait(_TURN_SECONDS))
            if any(isinstance(event, records.Signalled) for event in list(self._events)):
                return
            self._events.clear()

    def _end_all(self) -> None:
        """End what is left, for certain."""
        for worker in self._left():
            self._kill(worker)
        until = time.monotonic() + _KILLED_SECONDS
        while self._left() and (now := time.monotonic()) < until:
            self._receive(self._links.wait(_TURN_SECONDS))
            self._look_far(now)
        self._close_store()
        self._links.close_all()
        self._write_state(State.ENDED, [])

    def _write_state(self, state: State, members: Sequence[Mapping[str, Any]]) -> None:
        """Replace the state file as a whole if something has changed. If it cannot, that disturbs nobody."""
        generation = self._members.generation
        text = json.dumps({"state": state.value, "generation": generation, "members": members})
        if self._state_file and text != self._state:
            self._state, path = text, Path(self._state_file)
            new = path.with_name(f".{path.name}.new")
            with suppress(OSError):
                new.write_text(text + "\n", encoding="utf-8")
                os.replace(new, path)
