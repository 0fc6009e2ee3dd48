"""What this worker's training thread is doing, for whoever watches it from another thread."""

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

READING_DATA = "reading data for training step"
TRAINING = "in training step"
EVALUATING = "evaluating after step"
SAVING = "saving after step"

_PHASES = {READING_DATA: 0, TRAINING: 1}  # all else, such as evaluating, comes after the step
_GRAPH_CALLS = "tensorflow/python/ops/script_ops.py"
_OWN_FOLDER = str(Path(__file__).parents[1]) + "/"
_LIBRARIES = ("site-packages/", "dist-packages/", sysconfig.get_path("stdlib") + "/", "<")


class Activity(NamedTuple):
    """What the training thread is doing."""

    # the activity as text that follows "rank 1 is", such as "opening the data"; with a step, words that the
    # step's number follows, such as "in training step"
    name: str
    since_seconds: float  # when it began, by ``time.monotonic()``
    is_long: bool = False  # whether it was announced to take long, such as a save
    number: int = 0  # the number of changes of the activity before this one
    step: int = 0  # the training step, from 1; 0 if the activity belongs to none

    @property
    def place(self) -> int:
        """Where in the training this is: the larger, the further; 0 if the activity belongs to no step."""
        return self.step and 3 * self.step + _PHASES.get(self.name, 2)

    def __str__(self) -> str:
        """Return the activity as text that follows "rank 1 is"."""
        return f"{self.name} {self.step:,}" if self.step else self.name


class ActivityMark:
    """The current activity of the training thread. Only that thread changes it; any thread reads it."""

    def __init__(self) -> None:
        self.listener: Callable[[Activity], None] | None = None
        self.part = ""
        self.current = Activity("starting", time.monotonic(), is_long=True)
        self.thread_id = threading.main_thread().ident

    def enter(self, name: str, step: int = 0, is_long: bool = False) -> None:
        """Begin an activity, which lasts until the next one begins."""
        self.thread_id = threading.get_ident()
        self.current = Activity(name, time.monotonic(), is_long, self.current.number + 1, step)
        if self.listener is not None:
            self.listener(self.current)

    @contextmanager
    def during(self, name: str, step: int = 0, is_long: bool = True) -> Iterator[None]:
        """Return a context in which an activity lasts; afterwards the one before it begins again."""
        before = self.current
        self.enter(name, step, is_long)
        try:
            yield
        finally:
            self.enter(before.name, before.step, before.is_long)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the thread that calls is the training thread."""
        return threading.get_ident() == self.thread_id

    def progress(self) -> None:
        """Begin the current activity again: it does its next part. In another thread, do nothing."""
        if self.is_of_this_thread:
            self.enter(self.current.name, self.current.step, self.current.is_long)

    def stack(self) -> str:
        """Return the Python stack of the training thread, as a traceback shows it; empty if it has ended."""
        frame = sys._current_frames().get(self.thread_id or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def user_code(self) -> str:
        """Return where in the user's code the training thread is; empty if it is not in it."""
        frames = sys._current_frames()
        try:
            if found := _user_code(frames.get(self.thread_id or 0)):
                return found
            # a graph of TensorFlow runs functions of Python in threads of its own, and so is data read ahead
            is_reading = self.current.name == READING_DATA
            callers = (_GRAPH_CALLS, _OWN_FOLDER + "data/") if is_reading else (_GRAPH_CALLS,)
            others = (frame for frame in frames.values() if _is_called_by(frame, callers))
            return next(filter(None, map(_user_code, others)), "")
        finally:
            frames.clear()  # this frame is among them: the cycle would keep what their functions hold


def _user_code(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OWN_FOLDER):
            return ""
        if not any(part in path for part in _LIBRARIES):
            return f"{Path(path).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _is_called_by(frame: FrameType, callers: Collection[str]) -> bool:
    files = (one.f_code.co_filename for one, _ in traceback.walk_stack(frame))
    return any(caller in file for file in files for caller in callers)


ACTIVITY = ActivityMark()
