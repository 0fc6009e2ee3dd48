"""benchmarks/plan.py: what a row says of a prediction."""

import argparse
import importlib.util

import pytest
from support.documents import ROOT


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wide_range_and_a_failed_check_stand_in_the_row(benchmark):
    speed = {"median": 100.0, "low": 40.0, "high": 180.0}
    document = {
        "measurements": [
            {"checks": [{"predicted": 3.0, "measured": 2.0}, {"predicted": 1.0, "measured": 2.0}]}
        ],
        "predictions": [
            {"workers": count, "hosts": count, "link": "1gbit", "way": "none", "samples_per_second": speed}
            for count in (2, 4)
        ],
    }
    (one,) = benchmark.predictions(document, 2)
    args = argparse.Namespace(framework="torch", controller="gloo", model="mlp")
    row = benchmark.compare(one, 50.0, args)
    assert row["in range"]
    assert (row["error"], row["half width"], row["check"]) == (1.0, pytest.approx(0.7), 1.0)
    assert benchmark.shown(row).endswith("| +100% | yes | 70% | 100% |")
