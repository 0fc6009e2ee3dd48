"""How a worker of an elastic job starts."""

import random
from types import SimpleNamespace

import numpy as np

from hvdtrain.jobs.elastic import world_state as elastic_start


def test_a_warm_up_draws_no_random_numbers_of_the_training():
    def draw(batch, eval_batch):
        assert (batch, eval_batch) == ("batch", None)
        random.random()
        np.random.rand()

    session = SimpleNamespace(
        plan=lambda: None,
        data=SimpleNamespace(train_batch=lambda plan, progress: "batch", evaluation=None),
        backend=SimpleNamespace(warm_up=draw, enter_world=print),
    )
    before = random.getstate(), np.random.get_state()[1].tolist()
    elastic_start.warm_up(session)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
