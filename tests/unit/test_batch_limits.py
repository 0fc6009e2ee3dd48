"""Batches and lengths that cannot be meant, and those that can."""

import numpy as np
import pytest

from hvdtrain.config import Config
from hvdtrain.data.datasets import as_dataset
from hvdtrain.errors import ConfigError
from hvdtrain.jobs.opening import limits as batch_limits
from hvdtrain.training_plan import TrainingPlan


def data(size: int, width: int = 2) -> object:
    return as_dataset({"inputs": np.zeros((size, width), np.float32), "targets": np.zeros(size, np.int64)})


def checked(size: int = 3, workers: int = 1, width: int = 2, **fields: object) -> None:
    config = Config(**{"framework": "torch", "epochs": 1, **fields})
    plan = TrainingPlan.of(config, workers, size)
    one = data(size, width)
    batch_limits.check_batch_sizes(config, plan, one, one)


def refused(**fields: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        checked(**fields)
    return caught.value


def test_a_batch_far_beyond_the_data_is_refused_on_every_worker():
    error = refused(size=3, batch_size=10**8)
    assert error.everywhere
    assert error.problem == (
        "batch_size: a batch of all workers has 100,000,000 samples, for data of size 3; at most 65,536 are "
        "allowed"
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"global_batch_size": 10**8}, "global_batch_size"),
        ({"batch_size": 100, "accumulate": 10**6}, "batch_size"),
        ({"eval_batch_size": 10**8}, "eval_batch_size"),
    ],
)
def test_the_field_that_makes_the_batch_is_named(fields, field):
    assert refused(**fields).problem.startswith(f"{field}: a batch of all workers has 100,000,000 samples")
