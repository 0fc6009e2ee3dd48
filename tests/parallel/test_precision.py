"""Half precision, recomputed blocks and compiled models, in both frameworks."""

from pathlib import Path

import pytest
from jobs import FRAMEWORKS, launcher, run

SUITE = Path(__file__).with_name("suite_precision.py")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("workers", "controller"), [(1, "none"), (2, "mpi")])
def test_backend_computes_as_it_is_told(framework, workers, controller, tmp_path):
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
