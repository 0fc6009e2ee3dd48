"""A task with a slow worker whose loss fails in a step."""

from straggler_tasks import SlowLoss, is_slow

FAILS_IN_STEP = 6


class Breaks(SlowLoss):
    def __init__(self):
        self.biases = set()

    def torch_loss(self, model, batch):
        self.biases.add(float(model.bias.detach()))  # each step changes it, and the dry run does not
        if is_slow() and len(self.biases) == FAILS_IN_STEP:
            raise ValueError("broken on purpose")
        return super().torch_loss(model, batch)
