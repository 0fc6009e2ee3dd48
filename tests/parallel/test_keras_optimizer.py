"""The distributed optimizer for Keras 3 on two workers whose data differs."""

from pathlib import Path

import numpy as np
from support.pool import Key, call

JOB = Path(__file__).with_name("job_keras_optimizer.py")
OURS = ["fit", "apply_eagerly", "fp16", "keras_fit"]


def test_workers_with_other_data_get_what_one_worker_gets_from_all_of_it(tmp_path):
    call(Key("tf", "gloo", 2), "support.cases:script", tmp_path, path=str(JOB), arguments=[])
    one, other = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for way in OURS:
        np.testing.assert_array_equal(one[way], other[way])
        together = one["keras_together" if way == "keras_fit" else "together"]
        assert all(np.abs(one[way] - rank["alone"]).max() > 0.01 for rank in (one, other))
        difference = np.abs(one[way] - together).max()
        assert difference < 1e-6 if way != "fp16" else 0 < difference < 2e-3
    for worker in (one, other):  # what the README says of Horovod's own
        np.testing.assert_array_equal(worker["horovods"], worker["keras_alone"])
