"""Runs the contract suite for every framework, over both controllers, with 1, 2 and 3 workers."""

from pathlib import Path

import pytest
from jobs import FRAMEWORKS, launcher, run

SUITE = Path(__file__).with_name("suite_backend.py")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("workers", "controller"), [(1, "none"), (2, "mpi"), (2, "gloo"), (3, "mpi")])
def test_backend_keeps_the_contract(framework, workers, controller, tmp_path):
    pytest_command = ["python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(SUITE)]
    result = run(
        [*launcher(workers, controller), *pytest_command],
        tmp_path,
        timeout=240,
        HVDTRAIN_TEST_FRAMEWORK=framework,
        HVDTRAIN_TESTS_REQUIRED="0",
    )
    assert result.returncode == 0, result.output[-8000:]
    assert "passed" in result.stdout
