"""Running blocks of a job's steps through the loop that trains it, and timing them."""

import time
from itertools import pairwise

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.backends.step_signals import NO_FLAGS, ControlFlags
from hvdtrain.bench.step_split import Block
from hvdtrain.loop import run as run_loop
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import SilentReport
from hvdtrain.session import Session

_WARM_STEPS = 3  # at the start of a block: the data are not read ahead yet

Own = tuple[list[float], float]  # a worker's step times, and how long it waited for data in a step


class Recorder(SilentReport):
    """A report that keeps what the metrics of steps say.

    Attributes:
        first_loss: the loss of the first step.
        wait_seconds: of each step of the current block, how long all workers together waited for data.
        notes: what the training told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_loss: float | None = None
        self.wait_seconds: list[float] = []
        self.notes: list[str] = []

    def begin(self) -> None:
        """Begin a block."""
        self.wait_seconds.clear()

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Keep what a step's metrics say; local steps share what is known of all of them together."""
        if self.first_loss is None:
            self.first_loss = metrics.mean("loss")
        self.wait_seconds += step.steps * [metrics.statistics.data_wait_seconds / step.steps]


def run_block(session: Session, recorder: Recorder, steps: int) -> Own:
    """Collective unless the session has one worker. Train some steps and return how long each of them took.

    A step lasts from the moment when its batch is there to the one when the next step's batch is. Local steps
    are timed together, up to the next one after a synchronisation: each of these times is their mean.

    Args:
        session: the run; its report is the recorder.
        recorder: the report.
        steps: how many steps are timed; some more run before and after them. With local steps they are
            rounded up to whole synchronisations.
    """
    every = session.plan().sync_every
    warm, steps = whole_rounds(_WARM_STEPS, every), whole_rounds(steps, every)
    stamps: list[float] = []

    def poll_signals() -> ControlFlags:
        stamps.append(time.perf_counter())
        return ControlFlags(stop=len(stamps) > warm + steps)

    recorder.begin()
    session.wanted = session.unsent = NO_FLAGS
    run_loop(session, poll_signals)
    timed = stamps[warm : warm + steps + 1]
    if len(timed) <= steps:
        raise RuntimeError(f"a block of {steps} steps ended after {len(stamps)}")
    waits = recorder.wait_seconds[warm + 1 : warm + steps + 1]
    workers = session.backend.workers.size
    seconds = [(after - before) / every for before, after in pairwise(timed[::every])]
    return seconds, sum(waits) / workers / steps


def whole_rounds(steps: int, every: int) -> int:
    """Return the least number of steps that ends with a synchronisation, and is not less than given."""
    return -(-steps // every) * every


def joined(of_ranks: list[Own]) -> Block:
    """Return what all workers measured of a block, in the order of ranks."""
    return Block([seconds for seconds, _ in of_ranks], [waited for _, waited in of_ranks])
