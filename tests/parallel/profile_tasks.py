"""A task with a slow worker whose loss fails in a step."""

from straggler_tasks import SlowLoss, is_slow

FAILS_IN_CALL = 7  # the dry run is the first


class Breaks(SlowLoss):
    calls = 0

    def delayed_torch(self, inputs):
        self.calls += 1
        if is_slow() and self.calls == FAILS_IN_CALL:
            raise ValueError("broken on purpose")
        return super().delayed_torch(inputs)
