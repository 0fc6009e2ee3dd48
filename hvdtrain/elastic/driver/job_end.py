"""When an elastic job ends, and how its workers are notified."""

import signal

from hvdtrain.elastic.driver import records
from hvdtrain.elastic.driver.roster import ALIVE, IN_WORLD, Roster, Stage, Worker
from hvdtrain.elastic.driver.worlds import SAME_STEP, SAME_STEP_LOST, State, Worlds
from hvdtrain.elastic.messages import Abort, End, Stop
from hvdtrain.errors import EXIT_ENVIRONMENT, EXIT_STOPPED, EXIT_TRAINING, EXIT_USAGE
from hvdtrain.storage.text import counted
from hvdtrain.workers.world import Purpose

RESUME = "Continue from the newest checkpoint with --resume."
MEND_AND_RESUME = "Mend what they wait for, then use --resume."
_LOOK_AT_CRASH = "Look at the output of these workers. A crash of native code often leaves a core file."
_OUT_OF_MEMORY = (
    "Does the memory of a host run out at this step? The kernel's log (dmesg) says so of a process that it "
    "kills. Mend the cause, or use smaller batches, then continue with --resume."
)
CANNOT_ENTER = "Can the hosts reach one another? python -m hvdtrain doctor checks it."
FAILS_IN_WORLD = (
    "Look at the output of the workers for what fails in each world, such as an error of Horovod."
)
_CANNOT_START = "Look at the output of the workers."
_NOT_A_WORKER = (
    "The command must be python -m hvdtrain, or a script that calls hvdtrain.train(). A script that uses "
    "hvd.elastic needs HVDTRAIN_ELASTIC_DRIVER=horovod."
)
_ENDED = {
    records.COMMAND_NOT_FOUND: (": the command was not found", "Is it installed there, and in PATH?"),
    records.NOT_EXECUTABLE: (": the command cannot be executed", "Is it a program that you may execute?"),
    EXIT_USAGE: ("", f"{_CANNOT_START} Exit code 2 means a wrong option or a missing file."),
}
_NO_SLOTS = (
    "Give hosts with slots: -H, --hostfile, or a discovery script, which "
    "python -m hvdtrain doctor --host-discovery-script SCRIPT checks."
)

_LONGER_START = (
    "Give more time with --start-timeout, or look at the hosts: python -m hvdtrain doctor -H HOSTS."
)

_NAMED = 4  # workers that a message names
_LONGEST = 500  # characters of what one of them says


def cannot_start(last: Worker | None, command: str) -> tuple[int, str, str]:
    """Return exit code, problem and remedy of a job whose workers failed before anything was trained."""
    if last is None:
        return EXIT_ENVIRONMENT, "no worker can start", _CANNOT_START
    failed = f"no worker can start: {last} {last.reason[:_LONGEST]}"
    code = last.exit_code
    if last.failure is not None:
        return last.failure.exit_code, failed, _CANNOT_START
    if last.hello is None and code == records.SSH_FAILED:
        return EXIT_ENVIRONMENT, failed, f"Check it: python -m hvdtrain doctor -H {last.slot.host}"
    if last.hello is not None or last.is_late or code is None or code < 0:
        return EXIT_ENVIRONMENT, failed, _LONGER_START if last.is_late else _CANNOT_START
    what = f"`{command}`" if command else "the command"
    meaning, remedy = _ENDED.get(code, (" before it joined the job", f"{_CANNOT_START} {_NOT_A_WORKER}"))
    problem = f"no worker can start: on {last.slot.host}, {what} ended with exit code {code}{meaning}"
    return code or EXIT_ENVIRONMENT, problem, remedy


def _last(last: Worker | None) -> str:
    return f"; the last to fail: {last} {last.reason[:_LONGEST]}" if last else ""


def _resume_with(least: int) -> str:
    fewer = ", or with a lower --min-np" if least > 1 else ""
    return f"Continue with --resume when there are slots for {counted(least, 'worker')} or more{fewer}."


LEFT_SECONDS = 10.0  # for a worker to leave: rank 0 ends a save
GRACE_SECONDS = 30.0  # after which the signal to the launcher is forwarded
STOP_SECONDS = 600.0  # after which a job that does not stop is ended
SAVE_SECONDS = 45.0  # after an error of one worker: the others end a checkpoint that they write, within 40 s
MAX_SAME_FAILURES = 10

_FOREVER = float("inf")


class JobEnd:
    """Decides when the job ends, lets its workers save and stop before, and ends it."""

    def __init__(self, roster: Roster, worlds: Worlds, command: str) -> None:
        self._limits, self._roster, self._worlds, self._do = roster.limits, roster, worlds, roster.do
        self._command = command
        self._timeout = f"{self._limits.elastic_timeout:.0f} s (--elastic-timeout)"
        self.last_failure: Worker | None = None  # the worker that failed last
        self.purpose: Purpose = "train"  # what the next world is for: to train, or to save and end
        self.why_stopped = ""  # as text, if the workers save and stop
        self._remedy = ""  # if the job ends for a lack of workers
        self._signal = 0
        self._was_asked = False  # by a signal to the launcher
        self._exit_code: int | None = None
        self._grace_by = self._stop_by = self._complete_by = _FOREVER

    @property
    def is_complete(self) -> bool:
        """Whether a worker said that training is complete, so that no end of a process is a failure."""
        return self._exit_code is not None

    @property
    def is_ending(self) -> bool:
        """Whether no worker is to be started any more."""
        return self.purpose != "train" or self.is_complete or self._worlds.state is State.ENDED

    # the workers save and stop

    def stop(self, number: int, now: float) -> None:
        """Let all workers save and stop for a signal to the launcher; end them for SIGINT or a second one."""
        name = signal.Signals(number).name
        if self._was_asked or number == signal.SIGINT or not self._worlds.has_begun:
            when = "before training began"
            if self._was_asked:
                when = "while its workers were to save and stop"
            elif self._worlds.has_begun:
                when = "at once; --resume continues from the newest checkpoint"
            self.finish(128 + number, f"the job was ended by {name} {when}")
            return
        self.why_stopped = self.why_stopped or f"{name} came"
        self._was_asked, self._signal, self.purpose = True, number, "stop"
        self._do(records.Say(f"{name}: the workers save and stop"))
        if self._worlds.state is State.TRAINING:
            self.send_stop(now)

    def stop_for_lack(self, leaving: list[Worker]) -> None:
        """Let all workers, which were requested to leave, save and stop: nobody is left to continue."""
        are = "the only worker is" if len(leaving) == 1 else f"all {len(leaving)} workers are"
        causes = "; ".join(f"{one}: {one.wants_out[:_LONGEST]}" for one in leaving[:_NAMED])
        more = f"; and {len(leaving) - _NAMED} more" if len(leaving) > _NAMED else ""
        self.why_stopped = f"{are} to leave, and no other is ready ({causes}{more})"
        self._remedy = _resume_with(self._limits.least)
        self.purpose, self._signal = "stop", signal.SIGTERM
        self._do(records.Say(f"{self.why_stopped}: the job saves and stops"))

    def save_for_lack(self, have: int) -> None:
        """Let the workers that are left save and stop: for too long there were only so many."""
        self.purpose = "save"
        were = "worker was" if have == 1 else "workers were"
        self.why_stopped = (
            f"only {have} {were} left of at least {self._limits.least} (--min-np) for {self._timeout}"
            f"{_last(self.last_failure)}"
        )
        self._remedy = _resume_with(self._limits.least)
        self._do(records.Say(f"{self.why_stopped}: the job saves and stops"))

    def send_stop(self, now: float) -> None:
        """Let the workers of the world save and stop, as was requested."""
        self._worlds.state = State.STOPPING
        self._grace_by, self._stop_by = now + GRACE_SECONDS, min(self._stop_by, now + STOP_SECONDS)
        for worker in self._worlds.members:
            self._roster.send(worker, Stop(signal=self._signal, why=self.why_stopped))

    def press(self, now: float) -> None:
        """Forward the signal to workers that do not stop, and end them if that does not help."""
        if now >= self._grace_by:
            self._grace_by = _FOREVER
            for worker in self._worlds.members:
                self._do(records.Forward(worker.name, self._signal))
        if now >= self._stop_by:
            self.finish(128 + self._signal, f"the workers did not stop within {STOP_SECONDS:.0f} s")

    # training is complete

    def done(self, exit_code: int, now: float) -> None:
        """Take note that training is complete: the others say so, too, in a moment."""
        if self._exit_code is None:
            self._exit_code = exit_code
            self._complete_by = now + max(LEFT_SECONDS, self._roster.stall_timeout())
            self._worlds.state = State.STOPPING

    def completed(self, worker: Worker, now: float) -> bool:
        """Let a worker that waits for another world go, if training is complete; return whether it is."""
        if self._exit_code is None:
            return False
        worker.stage, worker.is_out, worker.end_by = Stage.GOING, True, now + LEFT_SECONDS
        self._roster.send(worker, End(problem="", exit_code=self._exit_code))
        return True

    def finish_complete(self, now: float) -> None:
        """End the job once all workers have said that training is complete, or had the time for it."""
        if not self._worlds.members or now >= self._complete_by:
            is_lack = bool(self._remedy) and self._exit_code == EXIT_STOPPED
            problem = f"{self.why_stopped}: the state is saved" if is_lack else ""
            self.finish(self._exit_code or 0, problem, self._remedy)

    # the job cannot continue

    def has_failed_for_good(self) -> bool:
        """End the job if another attempt would end as the last ones; return whether it has ended."""
        worlds = self._worlds
        if worlds.stalled and not self._roster.at(Stage.READY, *IN_WORLD):
            self.finish(EXIT_ENVIRONMENT, worlds.stalled, MEND_AND_RESUME)
        elif worlds.breaks_again(SAME_STEP, crashed=True):
            what = f"a worker crashed {SAME_STEP} times"
            self.finish(EXIT_TRAINING, what + self._at_same_place(), _LOOK_AT_CRASH)
        elif worlds.breaks_again(SAME_STEP_LOST, crashed=False):
            what = f"workers were lost {SAME_STEP_LOST} times"
            self.finish(EXIT_ENVIRONMENT, what + self._at_same_place(), _OUT_OF_MEMORY)
        elif self._limits.reset_limit is not None and worlds.broken > self._limits.reset_limit:
            self.finish(
                EXIT_ENVIRONMENT,
                f"workers were lost {worlds.broken} times; --reset-limit allows {self._limits.reset_limit}",
                RESUME,
            )
        elif worlds.same_failures >= MAX_SAME_FAILURES:
            doing = "made no step in a world" if worlds.was_up else "could not enter a world"
            self.finish(
                EXIT_ENVIRONMENT,
                f"the same workers {doing} {MAX_SAME_FAILURES} times in a row; the last time "
                f"{worlds.why_broken}",
                FAILS_IN_WORLD if worlds.was_up else CANNOT_ENTER,
            )
        return worlds.state is State.ENDED

    def _at_same_place(self) -> str:
        """Return where the training stands, as far as a worker that is left says it, and who failed last."""
        place = max((one.ready.place for one in self._roster if one.ready), default=None)
        after = f" after step {place.step:,}" if place else ""
        return f" in a row at the same place{after}{_last(self.last_failure)}"

    def finish_hopeless(self) -> None:
        """End a job whose workers failed again and again before anything was trained."""
        self.finish(*cannot_start(self.last_failure, self._command))

    def finish_unstarted(self, have: int) -> None:
        """End a job in which so many workers were ready, too few for its training to begin."""
        least = counted(self._limits.least, "worker")
        problem = f"{have} of at least {least} (--min-np) came within {self._timeout}"
        remedy = _CANNOT_START if self.last_failure else _NO_SLOTS
        self.finish(EXIT_ENVIRONMENT, problem + _last(self.last_failure), remedy)

    def finish_unsaved(self) -> None:
        """End a job that was to save, if none of its workers has the state of the training."""
        self.finish(
            EXIT_STOPPED,
            f"{f'{self.why_stopped}; ' if self._remedy else ''}no worker with the state of the training "
            "is left: nothing could be saved",
            self._remedy or RESUME,
        )

    def finish(
        self,
        exit_code: int,
        problem: str = "",
        remedy: str = "",
        *,
        reported: str = "",
        grace_seconds: float = records.END_SECONDS,
    ) -> None:
        """End the job. The launcher says the problem; ``reported`` is what a worker says in its place."""
        if self._worlds.state is State.FORMING:
            self._do(records.CloseStore())
        text, why = problem or reported, problem or reported or "the job ends"
        for worker in self._roster.at(*ALIVE):
            if not worker.is_connected:
                # it still starts, and has nothing to save
                self._do(records.Forward(worker.name, signal.SIGTERM))
                continue
            if worker.stage in IN_WORLD:
                self._roster.send(worker, Abort(generation=worker.generation, why=why))
            self._roster.send(worker, End(problem=text, remedy=remedy, exit_code=exit_code))
        self._worlds.state = State.ENDED
        self._do(records.Finish(exit_code, problem, remedy if problem else "", grace_seconds))
