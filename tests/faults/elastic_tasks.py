"""The task of the drill, killed at exact places on request, and held while a test waits for workers.

The variable ``HVDTRAIN_TEST_POINTS`` lists places as ``name@rank#count!signal``, separated by commas: the
``count``-th time that the worker of that rank gets there, it sends itself the signal, once in the whole job.

While there is a file ``hold`` in the folder of the job, each step takes a second: steps go on, so that
workers can come and go, but the job does not end before slow ones are there. ``HVDTRAIN_TEST_HELD_AT``
names a place, as ``name-rank``, at which the worker makes that file before the signal.
"""

import importlib
import os
import re
import sys
import time
from pathlib import Path

from hvdtrain.callbacks import Callback
from hvdtrain.tools.drill.task import Drill

# name to module, and name in it, of what is wrapped
PLACES = {
    "evaluating": ("hvdtrain.step_end", "_evaluate_set"),
    "writing": ("hvdtrain.checkpoints.storage", "write"),
    "saving": ("hvdtrain.step_end", "save"),
    "entering": ("hvdtrain.backends.workers", "HorovodWorkers.restart"),
    "entered": ("{backend}", "{Backend}.enter_world"),
    "stepping": ("{backend}", "{Backend}.train_step"),
}
HOLD = "hold"
_HELD_SECONDS = 1.0
_POINT = re.compile(r"(\w+)@(\d+)#(\d+)!(\d+)")


class Steady(Drill):
    """Killed or stopped at the places of ``HVDTRAIN_TEST_POINTS``; slow to start on request."""

    def __init__(self) -> None:
        super().__init__(step_seconds=float(os.environ.get("HVDTRAIN_TEST_STEP_SECONDS", "0.01")))

    def train_data(self):
        framework = "torch" if "hvdtrain.backends.torch.backend" in sys.modules else "tensorflow"
        for point in filter(None, os.environ.get("HVDTRAIN_TEST_POINTS", "").split(",")):
            _wrap(point, framework)
        return super().train_data()

    def callbacks(self):
        return [*super().callbacks(), _Held()]


class _Held(Callback):
    every_rank = True

    def on_step(self, step, metrics):
        until = time.monotonic() + _HELD_SECONDS
        while os.path.exists(HOLD) and time.monotonic() < until:
            time.sleep(0.02)


def _wrap(point: str, framework: str) -> None:
    names = {"torch": "Torch", "tensorflow": "TensorFlow"}
    module, path = (
        text.format(backend=f"hvdtrain.backends.{framework}.backend", Backend=f"{names[framework]}Backend")
        for text in PLACES[_POINT.fullmatch(point)[1]]
    )
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        _at(point, calls[0])
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _at(point: str, count: int) -> None:
    name, rank, wanted, number = _POINT.fullmatch(point).groups()
    if count < int(wanted) or os.environ.get("HOROVOD_RANK", "0") != rank:
        return
    try:
        Path(f"reached-{name}-{rank}").touch(exist_ok=False)
    except FileExistsError:
        return
    if os.environ.get("HVDTRAIN_TEST_HELD_AT") == f"{name}-{rank}":
        Path(HOLD).touch()
    os.kill(os.getpid(), int(number))
    time.sleep(60)  # a signal that kills has done so
