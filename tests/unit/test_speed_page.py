"""The tables of docs/speed.md are what benchmarks/speed.py makes of figures and formulas."""

import runpy
from types import SimpleNamespace

import pytest
from support.documents import ROOT

PAGE = ROOT / "docs" / "speed.md"
SCRIPT = "python benchmarks/speed.py"


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "speed.py")))


@pytest.mark.parametrize("name", ["latency_table", "ways_table"])
def test_a_table_is_what_the_script_prints(name, script):
    table = getattr(script, name)()
    assert f"\n\n{table}\n\n" in PAGE.read_text(encoding="utf-8"), f"{SCRIPT} prints:\n{table}"


def test_latency_follows_from_the_hops(script):
    """1.5 agreements of log2 N hops over MPI or 2(N-1) over Gloo, and a sum."""
    for workers, hops in ((2, 1.5 * 1 + 2), (16, 1.5 * 4 + (8 * 30) ** 0.5)):
        found = script.parts("MPI", "none", workers, "10gbit/5ms")["median"]
        assert found.agreement == pytest.approx(hops * 5e-3)
    for workers in (2, 16):
        found = script.parts("Gloo", "none", workers, "10gbit/5ms")["median"]
        assert found.agreement == pytest.approx(2.5 * 2 * (workers - 1) * 5e-3)


def test_a_step_is_computing_and_what_the_link_needs(script):
    found = script.parts("Gloo", "none", 16, "1gbit")["median"]
    size = 4 * (64 * 1400 + 3 * 1400**2 + 4 * 1400 + 1400 * 10 + 10)
    assert found.compute == script.COMPUTE_SECONDS
    assert found.transfer == pytest.approx(2 * 15 / 16 * size * 8 / (0.95 * 1e9))
    assert found.step == pytest.approx(found.compute + found.transfer + found.agreement)
    assert script.parts("Gloo", "batch x 4", 16, "1gbit")["median"].compute == 4 * script.COMPUTE_SECONDS


def test_the_measured_rows_are_all_of_the_benchmark(script):
    rows = list(script.measured_over_a_link())
    assert [row[1] for row in rows] == ["none", "fp16"] * 4
    assert rows[1] == ("Gloo, PyTorch", "fp16", 117, 276, 291)
    assert rows[6] == ("MPI, TensorFlow", "none", 52, 542, 399)
