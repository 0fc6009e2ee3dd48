"""The benchmark of the network, with a small model and a slow link: it measures what it says."""

import json
import sys

import pytest
from hosts import unavailable
from support.documents import ROOT
from support.jobs import run


@pytest.mark.alone
def test_compression_halves_what_a_slow_link_carries(tmp_path):
    if reason := unavailable():
        pytest.skip(reason)
    options = ["--rate", "40mbit", "--width", "800", "--steps", "6"]
    options += ["--frameworks", "torch", "--controllers", "gloo", "--json", str(tmp_path / "figures.json")]
    result = run([sys.executable, str(ROOT / "benchmarks" / "network.py"), *options], tmp_path, 550)
    assert result.returncode == 0, result.output
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert result.stdout.splitlines()[-1].startswith("| gloo | torch |")
    gradients = row["parameters"] * 4 / 1e6
    # a link holds up to 0.13 MB at the end of a step
    assert 0.95 * gradients < row["none, MB sent"] < 1.3 * gradients
    assert 0.95 * gradients / 2 < row["fp16, MB sent"] < 1.3 * gradients / 2
    assert row["none, limited"] > 0.5 * row["none, predicted"]
    assert row["ratio"] < 0.9
