"""The state machine of an elastic job's driver, played by a test: workers say things, time passes."""

from hvdtrain.elastic import messages
from hvdtrain.elastic.driver import records
from hvdtrain.elastic.driver.membership import Members
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.workers.world import TrainingPosition, World

LIMITS = records.Limits(wanted=2, least=1, most=4)


class Play:
    """A job whose workers do what the test says; ``worlds`` are those that each worker was sent to."""

    def __init__(
        self, limits: records.Limits = LIMITS, hosts: tuple[tuple[str, int], ...] = (("h1", 4),), **options
    ) -> None:
        self.now = 1000.0
        self.members = Members(limits, self.now, **options)
        self.actions: list[records.Action] = []
        self.worlds: dict[str, World] = {}
        self.places: dict[str, TrainingPosition] = {}
        self.valid: dict[str, bool] = {}
        self.discover(*hosts)

    def take(self, event: records.Event) -> list[records.Action]:
        """Feed an event; return what is done about it."""
        actions = self.members.take(event, self.now)
        self.actions += actions
        for action in actions:
            for world in getattr(action, "worlds", ()):
                self.worlds[world.members[world.rank].worker] = world
        return actions

    def of(self, kind: type) -> list:
        """Return the actions of a kind."""
        return [one for one in self.actions if isinstance(one, kind)]

    def discover(self, *hosts: tuple[str, int]) -> list[records.Action]:
        return self.take(records.Discovered(tuple(HostSlots(*host) for host in hosts)))

    def say(self, worker: str, message: messages.FromWorker) -> list[records.Action]:
        return self.take(records.Heard(worker, message))

    def arrive(self, worker: str) -> list[records.Action]:
        slot = self.slot(worker)
        host, pid = slot.host, 100 + int(worker[1:])
        hello = messages.Hello(host=host, machine=host, pid=pid, process_seconds=1.0)
        return self.take(records.Arrived(worker, hello))

    def slot(self, worker: str):
        return next(one.slot for one in self.of(records.Start) if one.worker == worker)

    def ready(self, *workers: str, digest: str = "same", **values: str) -> None:
        """Let workers wait for a world, where they stand."""
        for worker in workers:
            message = messages.Ready(
                generation=self.worlds[worker].generation if worker in self.worlds else 0,
                place=self.places.get(worker, TrainingPosition()),
                valid=self.valid.get(worker, False),
                digest=digest,
                stall_timeout=120.0,
                values=values,
            )
            self.say(worker, message)

    def come(self, *workers: str) -> None:
        """Let workers connect and build their models."""
        for worker in workers:
            self.arrive(worker)
            self.ready(worker)

    def form(self) -> None:
        """Let all workers of the world enter it and train."""
        world = self.world
        for member in world.members:
            self.say(member.worker, messages.Formed(generation=world.generation))
        for member in world.members:
            self.sync(member.worker)

    def sync(self, worker: str) -> None:
        world = self.world
        self.places[worker] = max(world.root, self.places.get(worker, TrainingPosition()))
        self.valid[worker] = True
        self.say(worker, messages.Synced(generation=world.generation, place=world.root))

    def step(self, step: int, *workers: str) -> None:
        """Let workers stand at a step."""
        for worker in workers or self.names:
            self.places[worker] = TrainingPosition(step)

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> list[records.Action]:
        """Let time pass; all workers but the silent ones send beats."""
        until, done = self.now + seconds, []
        while self.now < until and self.members.state.value != "ended":
            self.now = min(until, self.now + 0.25)
            for one in self.members.snapshot():
                if one["pid"] and one["worker"] not in silent:
                    done += self.say(
                        one["worker"], messages.Beat(state=["training", 1, 1, 4, False, 0.0, ""])
                    )
            done += self.take(records.Tick())
        return done

    def die(self, worker: str, code: int = -9) -> list[records.Action]:
        """Let the process of a worker end."""
        return [*self.take(records.Lost(worker)), *self.take(records.Exited(worker, code))]

    def obey(self, *workers: str) -> None:
        """Let workers that were told to leave do so."""
        for worker in workers:
            assert self.told(worker, messages.Leave), self.actions
            self.say(worker, messages.LeftWorld())
            self.die(worker, 0)

    def done(self, *workers: str, code: int = 0) -> None:
        for worker in workers:
            self.say(worker, messages.Done(exit_code=code))
            self.die(worker, code)

    @property
    def state(self) -> str:
        return self.members.state.value

    @property
    def world(self) -> World:
        """The newest world, as its rank 0 is told of it."""
        return next(world for world in self.worlds.values() if world.generation == self.members.generation)

    @property
    def names(self) -> list[str]:
        """The workers of the newest world in the order of ranks."""
        return [member.worker for member in self.world.members]

    @property
    def started(self) -> list[str]:
        return [one.worker for one in self.of(records.Start)]

    @property
    def killed(self) -> list[str]:
        return [one.worker for one in self.of(records.Kill)]

    @property
    def finish(self) -> records.Finish:
        return self.of(records.Finish)[0]

    @property
    def said(self) -> str:
        return "\n".join(one.text for one in self.of(records.Say))

    def told(self, worker: str, kind: type[messages.FromDriver] | type) -> list[messages.FromDriver]:
        """Return the messages of a kind that a worker was sent."""
        sent = [one.message for one in self.of(records.Send) if one.worker == worker]
        return [message for message in sent if isinstance(message, kind)]


def training(count: int = 2, limits: records.Limits | None = None, hosts=None, step: int = 10) -> Play:
    """Return a job that trains with some workers, which stand at a step."""
    limits = limits or records.Limits(wanted=count, least=1, most=count)
    play = Play(limits, hosts or (("h1", limits.most),))
    play.come(*[f"w{number + 1}" for number in range(count)])
    play.form()
    play.step(step)
    assert play.state == "training"
    return play
