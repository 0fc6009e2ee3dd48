"""Tasks for runs in an object store: their steps go as far as a file says, their data lie where asked."""

import os
import time
from pathlib import Path

import hvdtrain
from support.resumed_tasks import Fit
from support.stream_files import INPUTS, sample

SIZE, EVAL_SIZE = 60, 20
PARTS = [range(25), range(25, 40), range(40, SIZE)]
PACE, DATA = "HVDTRAIN_TEST_PACE", "HVDTRAIN_TEST_DATA"
PACE_FILE, REACHED_FILE = "pace", "reached"  # in the folder that PACE names
_HELD_SECONDS = 300.0


class Stored(Fit):
    """Fit the sums of some numbers."""

    inputs, outputs, metrics = INPUTS, 1, {}
    defaults = Fit.defaults | {"batch_size": 3}

    def train_data(self):
        return [sample(number) for number in range(SIZE)]

    def eval_data(self):
        return [sample(number) for number in range(SIZE, SIZE + EVAL_SIZE)]

    def callbacks(self):
        return [_Paced()]


class Parquet(Stored):
    """The same samples in files of Parquet, in the folder or at the URL that the environment names."""

    def train_data(self):
        return hvdtrain.open_parquet(
            f"{os.environ[DATA]}/part-*.parquet", inputs="x", targets="y", shuffle_blocks=2
        )


class _Paced:
    """Waits at the step that a file names while it does."""

    def __init__(self):
        self._folder = Path(os.environ[PACE])

    def on_step(self, step, metrics):
        until = time.monotonic() + _HELD_SECONDS
        while self._is_held(step.step) and time.monotonic() < until:
            time.sleep(0.01)

    def _is_held(self, step):
        try:
            is_held = step >= int((self._folder / PACE_FILE).read_text())
        except FileNotFoundError:
            return False
        if is_held:
            (self._folder / f"{REACHED_FILE}.new").write_text(str(step))
            (self._folder / f"{REACHED_FILE}.new").rename(self._folder / REACHED_FILE)
        return is_held
