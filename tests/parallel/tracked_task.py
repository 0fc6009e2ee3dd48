"""The digits with steps that take a while, so that a job can be stopped in its middle."""

import time

from hvdtrain.tasks.digits import Digits


class Slow(Digits):
    """The digits; a step takes 20 ms and more."""

    def callbacks(self):
        return [Waiting()]


class Waiting:
    """Waits after each step."""

    def on_step(self, step, metrics):
        time.sleep(0.02)
