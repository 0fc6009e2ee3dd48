"""Global generators are seeded before a task runs, and have their own state back when the job is done."""

import importlib
import random
import sys

import numpy as np
import pytest

from hvdtrain.workers.seeding import seed_generators, seed_host_generators, seeded_frameworks

TORCH = """
seeds = []
def manual_seed(seed): seeds.append(seed)
def get_rng_state(): return list(seeds)
def set_rng_state(state): seeds[:] = state
"""


@pytest.fixture
def torch_package(tmp_path, monkeypatch):
    """Makes ``import torch`` find a module that notes its seeds."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in ("tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    sys.modules.pop("torch", None)


def drawn() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_numbers_depend_on_seed_and_purpose_alone():
    with seeded_frameworks():
        numbers = []
        for seed, purpose in ((0, "task"), (0, "task"), (1, "task"), (0, "train_data")):
            seed_generators(seed, purpose)
            numbers.append(drawn())
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


def test_the_script_continues_with_its_own_numbers():
    def restart() -> None:
        random.seed(5)
        np.random.seed(5)

    restart()
    expected = drawn(), drawn()
    restart()
    assert drawn() == expected[0]
    with seeded_frameworks():
        seed_generators(0, "task")
        drawn()
    assert drawn() == expected[1]


def test_a_framework_is_seeded_when_it_is_imported(torch_package):
    finders = list(sys.meta_path)
    with seeded_frameworks():
        seed_generators(0, "import")
        torch = importlib.import_module("torch")
        assert len(torch.seeds) == 1
        assert torch.__spec__.origin == torch.__file__
        seed_generators(0, "import")
        assert torch.seeds[0] == torch.seeds[1] == seed_host_generators(0, "import")
        seed_generators(0, "task")
        assert torch.seeds[2] != torch.seeds[0]
    assert sys.meta_path == finders
    torch.seeds[:] = [3]
    with seeded_frameworks():
        seed_generators(0, "task")
        assert len(torch.seeds) == 2
    assert torch.seeds == [3], "it has its state back"
