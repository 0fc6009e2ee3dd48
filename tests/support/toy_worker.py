"""A worker of an elastic job without a framework and without Horovod, which starts in a moment.

It speaks with the real driver. In place of Horovod it adds numbers over sockets: all workers of a world find
rank 0 through the world's store, and rank 0 adds. Each step takes the positions of one batch, shared by the
workers of the world; the sum over all steps shows whether each position was taken once. Rank 0 keeps a log
that is cut and continued as that of a real job.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path

import psutil

from hvdtrain.elastic.handshake import prove_to_driver
from hvdtrain.elastic.messages import (
    Abort,
    AskValues,
    Beat,
    ChangeWorld,
    Done,
    DriverBeat,
    End,
    EnterWorld,
    Failed,
    Formed,
    FormFailed,
    FromWorker,
    Hello,
    KillProcess,
    Leave,
    Leaving,
    LeftWorld,
    Ready,
    Refuse,
    Retry,
    Stop,
    Synced,
    Values,
    encode,
    from_driver,
)
from hvdtrain.workers.world import Place, World, world_key

BATCH = 12


def value_at(position: int) -> int:
    """Return the number that a position contributes."""
    return (position * 2654435761) % 1000003


class Line:
    """A connection over which lines of JSON go one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._file = connection, connection.makefile("rb")

    def send(self, value: object) -> None:
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> object:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return json.loads(line)


class Driven:
    """The connection to the driver, and what it said."""

    def __init__(self) -> None:
        host, port = os.environ["HVDTRAIN_ELASTIC"].split(",")[0].rsplit(":", 1)
        self.key, self.name = os.environ["HOROVOD_RENDEZVOUS_KEY"], os.environ["HVDTRAIN_WORKER"]
        self._connection = socket.create_connection((host, int(port)), 10)
        prove_to_driver(self._connection, self.key, self.name)
        self._sending, self.news = threading.Lock(), threading.Condition()
        self.generation, self.change, self.stop = 0, False, 0
        self.world: World | None = None
        self.broken = False
        self.activity = ["building", 0, 0, 0, True, 0.0, ""]
        self.mesh: list[socket.socket] = []
        self.send(
            Hello(
                host=os.environ["TOY_HOST"],
                machine="toy",
                pid=os.getpid(),
                process_seconds=psutil.Process().create_time(),
            )
        )
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: FromWorker) -> None:
        with self._sending:
            self._connection.sendall(encode(message))

    def _beat(self) -> None:
        began, seen = time.monotonic(), list(self.activity)
        while True:
            if self.activity != seen:
                began, seen = time.monotonic(), list(self.activity)
            state = [*seen[:5], time.monotonic() - began, seen[6]]
            self.send(Beat(state=state))
            time.sleep(float(os.environ.get("TOY_BEAT", "0.3")))

    def _receive(self) -> None:
        try:
            for line in self._connection.makefile("rb"):
                self._take(from_driver(line))
        finally:
            traceback.print_exc()  # also if this end has a fault
            os._exit(3)  # the driver has ended, or given this worker up

    def _take(self, message: object) -> None:
        with self.news:
            match message:
                case EnterWorld(world=world):
                    self.world, self.generation, self.broken, self.change = (
                        world,
                        world.generation,
                        False,
                        False,
                    )
                case Abort(generation=generation) | Retry(generation=generation):
                    if generation == self.generation:
                        self.give_up()
                case ChangeWorld(generation=generation):
                    self.change = self.change or generation == self.generation
                case Stop(signal=number):
                    self.stop = number
                case KillProcess(pid=pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                case End(exit_code=code):
                    os._exit(code)
                case Refuse():
                    os._exit(3)
                case Leave():
                    self.send(LeftWorld())
                    os._exit(0)
                case AskValues():
                    values = {"digest": os.environ.get("TOY_DIGEST", "same")}
                    self.send(Values(part=0, of=1, values=values))
                case None:
                    raise AssertionError("not a message")
                case DriverBeat() | _:
                    pass
            self.news.notify_all()

    def give_up(self) -> None:
        """Let everything that waits in the world fail."""
        self.broken = True
        for connection in self.mesh:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def next_world(self, place: Place, valid: bool) -> World:
        stall = float(os.environ.get("TOY_STALL", "5"))
        while True:
            with self.news:
                self.world = None
                generation = self.generation
            self.send(
                Ready(
                    generation=generation,
                    place=place,
                    valid=valid,
                    digest=os.environ.get("TOY_DIGEST", "same"),
                    stall_timeout=stall,
                )
            )
            with self.news:
                while self.world is None and not (self.broken and self.generation > generation):
                    self.news.wait()
                if self.world is not None and not self.broken:
                    return self.world
                self.broken = False


class Mesh:
    """The workers of a world, connected through rank 0."""

    def __init__(self, driven: Driven, world: World) -> None:
        self.world, self._lines = world, []
        address, port = world.store
        key = world_key(driven.key, world.generation, world.salt)
        store = Line(self._watched(driven, socket.create_connection((address, port), 10)))
        if world.rank == 0:
            listener = self._watched(driven, socket.create_server(("127.0.0.1", 0)))
            store.send([key, 0, listener.getsockname()[1]])
            ranks = {}
            while len(ranks) < world.size - 1:
                line = Line(self._watched(driven, listener.accept()[0]))
                ranks[line.receive()] = line
            self._lines = [ranks[rank] for rank in sorted(ranks)]
        else:
            store.send([key, world.rank, 0])
            line = Line(self._watched(driven, socket.create_connection(("127.0.0.1", store.receive()), 10)))
            line.send(world.rank)
            self._lines = [line]

    @staticmethod
    def _watched(driven: Driven, connection: socket.socket) -> socket.socket:
        connection.settimeout(None)
        with driven.news:
            driven.mesh.append(connection)
            if driven.broken:
                raise ConnectionError("the world is broken")
        return connection

    def add(self, values: list[int]) -> list[int]:
        """Collective. Return the sums over all workers."""
        if self.world.rank:
            self._lines[0].send(values)
            return self._lines[0].receive()
        parts = [values, *(line.receive() for line in self._lines)]
        sums = [sum(column) for column in zip(*parts, strict=True)]
        return self.share(sums)

    def share(self, value: object) -> object:
        """Collective. Return rank 0's value."""
        if self.world.rank:
            return self._lines[0].receive()
        for line in self._lines:
            line.send(value)
        return value

    def close(self, driven: Driven) -> None:
        with driven.news:
            for connection in driven.mesh:
                connection.close()
            driven.mesh.clear()


class Trainer:
    """What a real job's loop, log and state are, in a few lines."""

    def __init__(self, driven: Driven, folder: Path, steps: int) -> None:
        self.driven, self.folder, self.steps = driven, folder, steps
        self.step = self.total = 0
        self.valid = self.leads = False
        self.recent: deque[list[int]] = deque(maxlen=64)

    def run(self) -> None:
        while True:
            world = self.driven.next_world(Place(self.step), self.valid)
            mesh = None
            try:
                try:
                    mesh = Mesh(self.driven, world)
                except OSError as error:
                    self.driven.send(FormFailed(generation=world.generation, reason=str(error)))
                    continue
                self.driven.send(Formed(generation=world.generation))
                self.sync(mesh)
                self.driven.send(Synced(generation=world.generation, place=Place(self.step)))
                if self.train(mesh):
                    return
            except OSError:
                pass  # a worker was lost: the next world
            finally:
                if mesh is None:
                    with self.driven.news:
                        for connection in self.driven.mesh:
                            connection.close()
                        self.driven.mesh.clear()
                else:
                    mesh.close(self.driven)

    def sync(self, mesh: Mesh) -> None:
        world = mesh.world
        if world.rank == 0:
            if world.source == "root":
                assert self.valid, "rank 0 has no valid state"
                assert self.step == world.root.step
            else:
                self.load(world.source == "checkpoint")
        else:
            self.valid = self.valid and self.step == world.root.step
        self.step, self.total = mesh.share([self.step, self.total])
        mesh.add([0])
        self.valid = True
        if world.rank == 0 and not self.leads:
            self.take_over()
        self.leads = world.rank == 0

    def load(self, has_checkpoint: bool) -> None:
        path = self.folder / "checkpoint"
        self.step, self.total = json.loads(path.read_text()) if has_checkpoint and path.exists() else (0, 0)

    def take_over(self) -> None:
        path = self.folder / "log"
        text = path.read_text() if path.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rows = [row for row in rows if row[0] <= self.step]
        known = {row[0] for row in rows}
        rows += [row for row in self.recent if row[0] not in known and row[0] <= self.step]
        new = path.with_name("log.new")
        new.write_text("".join(json.dumps(row) + "\n" for row in rows))
        new.replace(path)

    def train(self, mesh: Mesh) -> bool:
        world, driven = mesh.world, self.driven
        while self.step < self.steps and world.purpose == "train":
            driven.activity = [
                "in training step",
                self.step,
                self.step + 1,
                3 * self.step + 4,
                False,
                0.0,
                "",
            ]
            share = range(self.step * BATCH + world.rank, (self.step + 1) * BATCH, world.size)
            time.sleep(float(os.environ.get("TOY_STEP", "0.005")))
            if os.environ.get("TOY_CRASH") == str(self.step):
                os.kill(os.getpid(), signal.SIGSEGV)
            finish = world.rank == 0 and (self.folder / "finish").exists()
            part = [sum(map(value_at, share)), len(share), driven.change, bool(driven.stop), finish]
            added, count, change, stop, finish = mesh.add([int(one) for one in part])
            assert count == BATCH
            self.step, self.total = self.step + 1, self.total + added
            row = [self.step, added, world.generation]
            self.recent.append(row)
            if world.rank == 0:
                with (self.folder / "log").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if self.step % 20 == 0:
                    self.save()
            if stop or finish:
                return self.end(mesh, 75 if stop else 0)
            if change:
                return False
        return self.end(mesh, 0 if world.purpose == "train" else 75)

    def save(self) -> None:
        new = self.folder / "checkpoint.new"
        new.write_text(json.dumps([self.step, self.total]))
        new.replace(self.folder / "checkpoint")

    def end(self, mesh: Mesh, code: int) -> bool:
        if mesh.world.rank == 0:
            self.save()
        mesh.add([0])
        self.driven.send(Done(exit_code=code))
        os._exit(code)


def main() -> None:
    driven = Driven()
    signal.signal(signal.SIGTERM, lambda number, frame: driven.send(Leaving(why="SIGTERM")))
    time.sleep(float(os.environ.get("TOY_BUILD", "0")))
    if problem := os.environ.get("TOY_FAIL", ""):
        driven.send(Failed(blame=problem, problem="the toy fails", exit_code=4))
        time.sleep(60)
    Trainer(driven, Path(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
