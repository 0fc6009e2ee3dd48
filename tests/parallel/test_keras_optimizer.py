"""The distributed optimizer for Keras 3 on two workers whose data differs; and Horovod's own, which fails."""

from pathlib import Path

import numpy as np
import pytest
from support.jobs import launcher, run

JOB = Path(__file__).with_name("job_keras_optimizer.py")
OURS = ["fit", "fit_eagerly", "apply", "apply_eagerly", "fp16", "keras_fit"]


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """The parameters of both workers, by the way in which they were trained."""
    folder = tmp_path_factory.mktemp("keras-optimizer")
    result = run([*launcher(2, "mpi"), "python", str(JOB)], folder)
    assert result.returncode == 0, result.output[-5000:]
    ranks = [np.load(folder / f"rank-{rank}.npz") for rank in range(2)]
    return {way: [rank[way] for rank in ranks] for way in ranks[0].files}


@pytest.mark.parametrize("way", OURS)
def test_workers_end_with_identical_parameters(parameters, way):
    one, other = parameters[way]
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("way", OURS)
def test_they_differ_from_what_a_worker_gets_alone(parameters, way):
    for trained, alone in zip(parameters[way], parameters["alone"], strict=True):
        assert np.abs(trained - alone).max() > 0.01


@pytest.mark.parametrize("way", ["fit", "fit_eagerly", "apply", "apply_eagerly"])
def test_they_are_what_one_worker_gets_from_all_data(parameters, way):
    np.testing.assert_allclose(parameters[way][0], parameters["together"][0], atol=1e-6)


def test_a_keras_optimizer_inside_gives_what_it_gives_from_all_data(parameters):
    np.testing.assert_allclose(parameters["keras_fit"][0], parameters["keras_together"][0], atol=1e-6)


def test_fp16_compression_gives_nearly_the_same(parameters):
    difference = np.abs(parameters["fp16"][0] - parameters["together"][0]).max()
    assert 0 < difference < 2e-3
