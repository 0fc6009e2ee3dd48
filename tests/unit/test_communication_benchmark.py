"""benchmarks/communication.py: what a row says of the documents of ``bench``."""

import importlib
from pathlib import Path

import pytest

from hvdtrain.errors import EnvironmentFault

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def communication(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("communication")


def document(raw):
    parts = {"data": 0.0, "compute": 0.020, "slowest": 0.001, "communication": 0.005}
    sums = [{"bytes": size, "horovod_seconds": {"median": 0.004}, "raw_seconds": raw} for size in (400, 800)]
    return {
        "mean_step_seconds": {"median": 0.026},
        "part_seconds": {name: {"median": value} for name, value in parts.items()},
        "all_reduce": sums,
        "all_reduce_beside": "not compared: no mpi4py",
    }


def test_what_a_step_takes_beside_computing_is_divided_by_the_bare_sum(communication):
    found = communication.figures(document({"median": 0.002}), 800)
    assert (found["ratio"], found["exposed ratio"], found["horovod ratio"]) == pytest.approx((3, 2.5, 2))
    words = communication.row("tf", "mpi", "mlp", 800, [found])
    assert "| 26.00 | 20.00 | 1.00 | 5.00 | 2.00 | 3.00 (3.00-3.00) |" in words


@pytest.mark.parametrize(("raw", "size"), [(None, 800), ({"median": 0.002}, 804)])
def test_a_job_without_a_bare_sum_of_its_bytes_fails(communication, raw, size):
    with pytest.raises(EnvironmentFault, match=f"no bare sum of {size} bytes"):
        communication.figures(document(raw), size)
