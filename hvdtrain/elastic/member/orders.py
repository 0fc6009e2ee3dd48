"""What the driver of an elastic job has sent to this worker, as its training thread finds it."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Literal

import psutil

from hvdtrain import errors
from hvdtrain.elastic import messages
from hvdtrain.elastic.watch.liveness import machine_id
from hvdtrain.host.launcher import host_name
from hvdtrain.workers.world import World

Blame = Literal["code", "environment", "peer"]

_MAX_VALUE = 4096
# a file or a connection of this host failed; the same code may work on another host
_OF_THE_HOST = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.ENOMEM,
    errno.ENODEV,
    errno.ETIMEDOUT,
}


def hello(environ: Mapping[str, str]) -> messages.Hello:
    """Return the first message of this worker."""
    return messages.Hello(
        host=host_name(environ),
        machine=machine_id(),
        pid=os.getpid(),
        process_seconds=psutil.Process().create_time(),
    )


def value_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts, by name; a long one is cut and has a digest of the whole at its end."""
    return {_cut(name): _cut(repr(value)) for name, value in sorted(values.items())}


def failure_of(error: BaseException) -> messages.Failed:
    """Return what the driver is notified of an error that ends this worker."""
    if isinstance(error, errors.HvdtrainError):
        problem, remedy = error.problem, error.remedy
    elif isinstance(error, errors.Interrupted):
        problem, remedy = f"interrupted by {error}", ""
    else:
        problem, remedy = f"{type(error).__name__}: {error}", ""
    return messages.Failed(
        blame=blame_for(error),
        problem=sendable(problem),
        remedy=sendable(remedy),
        exit_code=getattr(error, "exit_code", 1),
    )


def blame_for(error: BaseException) -> Blame:
    """Return whose error it is: "code" ends the job, after the others the job continues without this worker.

    What every worker raises alike would come again, so it counts as code. So does what the task's code
    raises, unless its cause is the memory, a disk or a network of this host.
    """
    if isinstance(error, errors.PeerLostError):
        return "peer"
    cause = error.__cause__ if isinstance(error, errors.WorkerFailure) else error
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _OF_THE_HOST):
        return "environment"
    if isinstance(error, errors.AgreementError | errors.ExchangeError | errors.SaveError) or getattr(
        error, "everywhere", False
    ):
        return "code"
    return (
        "environment" if isinstance(error, errors.EnvironmentFault | OSError | errors.Interrupted) else "code"
    )


def sendable(text: str) -> str:
    """Return a text that a message can hold: without what UTF-8 cannot encode, and not too long."""
    return text[: messages.MAX_TEXT].encode(errors="backslashreplace").decode()[: messages.MAX_TEXT]


def _cut(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _MAX_VALUE:
        return text
    return f"{text[:_MAX_VALUE]}... (SHA-256 of the whole: {sha256(text.encode()).hexdigest()[:16]})"


_TURN_SECONDS = 1.0
_EXPLAINED_SECONDS = 0.5


class Orders:
    """The orders that count. The member thread takes them, the training thread follows them."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._news = threading.Condition()
        self.generation = 0  # the newest world that this worker was notified of
        self.stop, self.why_stop = 0, ""  # the signal for which all are to save and stop, and why
        self.broken = self.change = ""  # why that world is given up, or is to be left at the next step
        self.ended: errors.JobEnded | None = None  # how the driver ended the job
        self.is_waiting = self.is_ending = False  # whether the training thread waits for a world, or ends
        self._refused: errors.RefusedError | None = None
        self._leave = ""
        self._next: World | None = None

    # called by the member thread

    def take(self, message: messages.FromDriver) -> bool:
        """Take note of a message; return whether this worker is to say again that it is ready."""
        with self._news:
            self._news.notify_all()
            match message:
                case messages.EnterWorld(world=world) if (
                    self.is_waiting and world.generation > self.generation
                ):
                    self._next, self.generation, self.change = world, world.generation, ""
                case messages.Abort(generation=generation, why=why, again=again) if (
                    generation == self.generation
                ):
                    return self._give_up(why) or (again and self.is_waiting)
                case messages.ChangeWorld(generation=generation, why=why) if generation == self.generation:
                    self.change = why or "the workers change"
                case messages.Stop(signal=number, why=why):
                    self.stop, self.why_stop = number, why or f"{signal.Signals(number).name} came"
                case messages.Leave(why=why):
                    self._leave = why or "the launcher does not need this worker any longer"
                case messages.Refuse(problem=problem, remedy=remedy):
                    self._refused = errors.RefusedError(problem, remedy)
                case messages.End(problem=problem, remedy=remedy, exit_code=code, speaks=speaks):
                    self._end(errors.JobEnded(problem, remedy, exit_code=code, speaks=speaks))
        return False

    def end(self, error: errors.JobEnded) -> None:
        """End the job as far as this worker is concerned, unless the driver did."""
        with self._news:
            self._end(error)

    def give_up(self, why: str) -> None:
        """Let the world that this worker is in fail; does nothing if it is in none, or that is broken."""
        with self._news:
            if self.generation and not self.is_waiting and not self.broken:
                self._give_up(why)

    def repeat_abort(self) -> None:
        """Abort again if the world is broken: a start of Horovod may have begun after the first time."""
        with self._news:
            if self.broken and not self.is_waiting:
                with suppress(Exception):  # the thread that calls it must continue
                    self._abort(self.broken)

    # called by the training thread

    def begin_waiting(self) -> int:
        """Leave the world behind, and return its generation."""
        with self._news:
            self._raise_if_over()
            self.is_waiting, self.broken, self.change, self._next = True, "", "", None
            return self.generation

    def wait(self) -> World:
        """Wait for the next world, after ``begin_waiting``; raises what that raises."""
        try:
            with self._news:
                while self._next is None:
                    self._raise_if_over()
                    self._news.wait(_TURN_SECONDS)
                self._raise_if_over()
                world, self._next, self.is_waiting = self._next, None, False
                return world
        finally:
            self.is_waiting = False

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the driver ends the job, or the time is over."""
        with self._news:
            self._news.wait_for(lambda: self.ended is not None, seconds)

    def explain(self) -> str:
        """Return why the world is broken; empty if that does not arrive in a moment."""
        with self._news:
            self._news.wait_for(lambda: bool(self.broken), _EXPLAINED_SECONDS)
            return self.broken

    @property
    def wants_change(self) -> bool:
        """Whether the training thread is to leave its world at the next step."""
        return bool(self.change or self._leave or self.broken or self.ended or self._refused)

    def _give_up(self, why: str) -> bool:
        if not self.is_waiting:
            self.broken = why or "a worker was lost"
            self.repeat_abort()
            return False
        dropped, self._next = self._next, None
        return dropped is not None

    def _end(self, error: errors.JobEnded) -> None:
        if self.ended is None:
            self.ended = error
            self._news.notify_all()
            self._give_up(error.problem)

    def _raise_if_over(self) -> None:
        for error in (self._refused, errors.Removed(self._leave) if self._leave else None, self.ended):
            if error is not None:
                self.is_ending = True
                raise error
