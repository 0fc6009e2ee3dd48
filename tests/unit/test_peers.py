"""benchmarks/peers.py: in which order programs run, and what becomes of those that fail."""

import argparse
import importlib.util

import pytest
from support.documents import ROOT

from hvdtrain.errors import EnvironmentFault

FOLDER = ROOT / "benchmarks"


def arguments(**values) -> argparse.Namespace:
    usual = {"alternations": 4, "steps": 20, "limit": 300.0, "workers": 2, "peers": None}
    return argparse.Namespace(**usual | values)


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("peers", FOLDER / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_other_pair_begins_with_the_peer(peers, monkeypatch, capsys):
    order = []

    def milliseconds(framework, program, *_):
        order.append(program)
        return len(order)

    monkeypatch.setattr(peers, "milliseconds", milliseconds)
    peers.compare("torch", "ddp", "mlp", "gloo", arguments())
    assert order == ["hvdtrain", "ddp", "ddp", "hvdtrain"] * 2
    # each ratio is that of two neighbours: 1/2, 4/3, 5/6, 8/7
    assert capsys.readouterr().out == "| torch | mlp | gloo | 4.50 | ddp | 4.50 | 0.99 (0.50-1.33) |\n"


def test_a_program_that_fails_ends_its_comparison_alone(peers, monkeypatch, capsys):
    def milliseconds(framework, program, *_):
        if program == "ddp":
            raise EnvironmentFault("torch ddp mlp gloo ended with exit code 1")
        return 1.0

    monkeypatch.setattr(peers, "milliseconds", milliseconds)
    given = arguments(frameworks=["torch"], models=["mlp"], controllers=["gloo"])
    assert peers.compare_all(given) == 1
    shown = capsys.readouterr()
    assert "horovod | 1.00 | 1.00 (1.00-1.00)" in shown.out
    assert "ended with exit code 1" in shown.err
