"""Horovod's own optimizer for Keras, on two workers whose data differs: README's warning."""

from pathlib import Path

import numpy as np
from support.pool import Key, call

JOB = Path(__file__).with_name("job_keras_optimizer.py")


def test_horovods_own_optimizer_reduces_no_gradients_under_keras_3(tmp_path):
    call(Key("tf", "gloo", 2), "support.cases:script", tmp_path, path=str(JOB), arguments=[])
    one, other = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for worker in (one, other):
        np.testing.assert_array_equal(worker["wrapped"], worker["alone"])
    assert np.abs(one["wrapped"] - other["wrapped"]).max() > 0.01
