"""The entry for Horovod's launcher: `horovodrun` with --min-np or a discovery script comes here."""

import os
import signal
import sys
from types import FrameType
from typing import Any


def run_elastic(args: Any) -> None:
    """Run an elastic job, and end the launcher with its exit code."""
    signal.signal(signal.SIGINT, _end_at_once)
    from hvdtrain.elastic.driver.host_job import run_host_job

    run_host_job(args)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    print(f"horovodrun: the job was ended by {name} before training began", file=sys.stderr, flush=True)
    os._exit(128 + number)
