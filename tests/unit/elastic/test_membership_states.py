"""Whatever happens in whatever order: one world at a time, no state lost, no wait without an end."""

import signal
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.elastic_play import Play

from hvdtrain.elastic import messages
from hvdtrain.elastic.driver import records
from hvdtrain.workers.world import TrainingPosition

PICK = st.integers(0, 10)
IN_WORLD = ("entering", "syncing", "training")


def happens(*states, **strategies):
    """Return the decorator of a rule for a job that is at one of these states, or has not ended."""
    may = precondition(lambda self: self.play.state in states if states else self.play.state != "ended")
    return lambda method: may(rule(**strategies)(method))


class Simulated:
    """What a real worker would know and do."""

    def __init__(self):
        self.stage = "started"  # building, ready, entering, syncing, training, frozen is apart
        self.step, self.valid, self.generation = 0, False, 0
        self.is_frozen = False


class Jobs(RuleBasedStateMachine):
    """Workers that follow the protocol, and die, freeze and leave whenever they like."""

    @initialize(
        wanted=st.integers(1, 3), needs_two=st.booleans(), more=st.integers(0, 2), begun=st.booleans()
    )
    def begin(self, wanted, needs_two, more, begun):
        counts = wanted, min(wanted, 1 + needs_two), wanted + more
        self.limits = records.Limits(*counts, elastic_timeout=100, cooldown_seconds=(1, 4))
        self.play = Play(self.limits, (("h1", 2), ("h2", 2)))
        self.workers, self.seen, self.store_open = {}, 0, False
        self.follow()
        if begun:
            self.goes_well()

    def follow(self):
        """Let the workers take what was sent to them."""
        while self.seen < len(self.play.actions):
            action = self.play.actions[self.seen]
            self.seen += 1
            match action:
                case records.Start(worker):
                    self.workers[worker] = Simulated()
                case records.OpenWorld(worlds):
                    self.enter(worlds)
                case records.CloseStore():
                    self.store_open = False
                case records.Kill(worker) if self.workers.pop(worker, None):
                    self.play.die(worker)
                case records.Send(name, message) if name in self.workers:
                    self.obey(name, message)

    def enter(self, worlds):
        assert not self.store_open, "two stores at once"
        self.check_world(worlds)
        self.store_open = True
        for world in worlds:
            worker = self.workers.get(world.members[world.rank].worker)
            if worker and not worker.is_frozen:
                worker.stage, worker.generation = "entering", world.generation

    def obey(self, name, message):
        worker = self.workers[name]
        if worker.is_frozen:
            return
        if isinstance(message, messages.Leave):
            self.play.say(name, messages.LeftWorld())
        if isinstance(message, messages.Leave | messages.End):
            self.gone(name, 0 if isinstance(message, messages.Leave) else 3)
        if isinstance(message, messages.Abort) and message.generation == worker.generation:
            worker.stage = "between" if worker.stage in IN_WORLD else worker.stage

    def say(self, name, message):
        self.play.say(name, message)
        self.follow()

    def gone(self, name, code):
        self.workers.pop(name, None)
        self.play.die(name, code)

    def check_world(self, worlds):
        first = worlds[0]
        members = first.members
        assert [world.rank for world in worlds] == list(range(len(worlds)))
        assert all(world.members == members for world in worlds)
        assert len({one.worker for one in members}) == len(members) <= self.limits.most
        for one in members:
            worker = self.workers.get(one.worker)
            assert worker is None or worker.is_frozen or worker.stage == "ready", "a second world at once"
        hosts = [one.host for one in members]
        assert len(set(hosts)) == 1 + sum(first != second for first, second in pairwise(hosts))
        whole = {name: one for name, one in self.workers.items() if one.valid and one.stage == "ready"}
        if first.source == "root":
            root = self.workers[members[0].worker]
            assert root.valid
            assert root.step == max(one.step for one in whole.values())
        else:
            assert not whole, "a valid source was lost"

    def pick(self, number, *stages):
        found = self.workers.items()
        names = sorted(name for name, one in found if one.stage in stages and not one.is_frozen)
        return names[number % len(names)] if names else None

    def ready(self, name):
        worker = self.workers[name]
        self.play.places[name], self.play.valid[name] = TrainingPosition(worker.step), worker.valid
        worker.stage = "ready"
        generation = worker.generation
        if generation:  # as this worker knows it
            self.play.worlds[name] = self.play.worlds[name].model_copy(update={"generation": generation})
        else:
            self.play.worlds.pop(name, None)
        self.play.ready(name)
        self.follow()

    @happens(number=PICK)
    def arrives(self, number):
        if name := self.pick(number, "started"):
            self.workers[name].stage = "building"
            self.play.arrive(name)
            self.follow()

    @happens(number=PICK)
    def gets_ready(self, number):
        if name := self.pick(number, "building", "between"):
            self.ready(name)

    @happens(number=PICK)
    def forms(self, number):
        if name := self.pick(number, "entering"):
            worker = self.workers[name]
            others = [one for one in self.workers.values() if one.generation == worker.generation]
            if len(others) == self.play.world.size and not any(one.is_frozen for one in others):
                worker.stage = "syncing"
                self.say(name, messages.Formed(generation=worker.generation))

    @happens(number=PICK)
    def fails_to_form(self, number):
        if name := self.pick(number, "entering"):
            generation = self.workers[name].generation
            self.say(name, messages.FormFailed(generation=generation, reason="no route"))

    @happens("syncing", "training", number=PICK)
    def syncs(self, number):
        if self.play.state in ("syncing", "training") and (name := self.pick(number, "syncing")):
            worker, world = self.workers[name], self.play.world
            root = self.workers.get(world.members[0].worker)
            if root is None or root.generation != worker.generation:
                worker.valid = False  # in the middle of receiving
                return
            worker.valid, worker.step, worker.stage = True, root.step, "training"
            place = TrainingPosition(root.step)
            self.say(name, messages.Synced(generation=worker.generation, place=place))

    @happens("training", "stopping", number=PICK)
    def steps(self, number):
        """Let all make a step; a random number of them do not learn that it is done."""
        training = sorted(name for name, one in self.workers.items() if one.stage == "training")
        if len(training) == self.play.world.size and not any(self.workers[one].is_frozen for one in training):
            known = {self.workers[name].step for name in training}
            step = max(known)
            for index, name in enumerate(training):
                if index != number and (self.workers[name].step < step or len(known) == 1):
                    self.workers[name].step += 1

    @happens("changing", number=PICK)
    def leaves_its_world(self, number):
        if name := self.pick(number, "entering", "syncing", "training"):
            self.ready(name)

    @happens(number=PICK, code=st.sampled_from([-9, -11, 0, 1]), order=st.booleans())
    def dies(self, number, code, order):
        names = sorted(self.workers)
        if names:
            name = names[number % len(names)]
            del self.workers[name]
            events = [records.Lost(name), records.Exited(name, code)]
            for event in events if order else events[::-1]:
                self.play.take(event)
            self.follow()

    @happens(number=PICK)
    def freezes(self, number):
        if name := self.pick(number, "building", "ready", "entering", "syncing", "training"):
            self.workers[name].is_frozen = True

    @happens(number=PICK)
    def wants_out(self, number):
        if name := self.pick(number, "building", "ready", "training"):
            self.say(name, messages.Leaving(why="SIGTERM"))

    @happens(number=PICK, blame=st.sampled_from(["environment", "peer"]))
    def fails(self, number, blame):
        if name := self.pick(number, "building", "training"):
            self.say(name, messages.Failed(blame=blame, problem="disk full", exit_code=3))

    @happens(first=st.integers(0, 2), second=st.integers(0, 2))
    def hosts_change(self, first, second):
        self.play.discover(("h1", first), ("h2", second))
        self.follow()

    @happens(seconds=st.sampled_from([0.3, 1.5, 3.0, 12.0, 40.0]))
    def time_passes(self, seconds):
        until = self.play.now + seconds
        while self.play.now < until and self.play.state != "ended":
            frozen = tuple(name for name, one in self.workers.items() if one.is_frozen)
            self.play.wait(min(1.0, until - self.play.now), silent=frozen)
            self.follow()

    @happens("training", number=PICK)
    def is_done(self, number):
        if number == 0 and (name := self.pick(0, "training")):
            self.play.say(name, messages.Done(exit_code=0))
            self.gone(name, 0)
            self.follow()

    @happens(number=PICK)
    def is_stopped(self, number):
        if number == 0:
            self.play.take(records.Signalled(signal.SIGTERM))
            self.follow()

    @rule()
    def goes_well(self):
        """Let all that can go on do so."""
        for number in range(4):
            for _ in range(4):
                if self.play.state != "ended":
                    self.arrives(number)
                    self.gets_ready(number)
                    self.forms(number)
                    self.syncs(number)

    def teardown(self):
        """Without further failures a stopped job comes to its end, and says so once."""
        if not hasattr(self, "play"):
            return
        self.play.take(records.Signalled(signal.SIGTERM))
        self.follow()
        for _ in range(1000):
            if self.play.state == "ended":
                break
            self.time_passes(1.0)
            self.goes_well()
            for number in range(4):
                if self.play.state == "changing":
                    self.leaves_its_world(number)
            training = [name for name, one in self.workers.items() if one.stage == "training"]
            if self.play.state == "stopping" and not any(self.workers[one].is_frozen for one in training):
                for name in training:
                    self.play.say(name, messages.Done(exit_code=75))
                    self.gone(name, 75)
                self.follow()
        assert self.play.state == "ended", (self.play.state, self.play.members.snapshot())
        assert sum(isinstance(one, records.Finish) for one in self.play.actions) == 1


TestJobs = Jobs.TestCase
TestJobs.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
