"""Run the driver of an elastic job in the main thread: signals to it, and what is said at the end."""

import signal
from collections.abc import Callable
from typing import Any

from hvdtrain.elastic.driver.driver import Driver, Outcome
from hvdtrain.elastic.notices import say
from hvdtrain.errors import EXIT_STOPPED

_STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)  # as the launcher of other jobs takes them


def run_driver(driver: Driver, save: Callable[[], None]) -> Outcome:
    """Run a job to its end. Only the main thread may call it.

    SIGTERM, SIGUSR2 and SIGHUP stop the job in order, SIGINT at once; SIGUSR1 lets workers save.

    Args:
        driver: the driver, which listens.
        save: passes SIGUSR1 on to the workers.
    """

    def stop(number: int, frame: Any) -> None:
        driver.signal(number)

    signal.signal(signal.SIGINT, stop)
    for number in _STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, lambda number, frame: save())
    return driver.run()


def report(name: str, outcome: Outcome) -> int:
    """Say how a job ended unless a worker said it, and return its exit code."""
    if outcome.problem:
        say(name, "\n".join(text for text in (outcome.problem, outcome.remedy) if text))
    elif outcome.exit_code == EXIT_STOPPED:
        say(name, f"the workers stopped on request and can be resumed (exit code {EXIT_STOPPED}).")
    return outcome.exit_code
