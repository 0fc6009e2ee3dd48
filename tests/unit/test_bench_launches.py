"""What bench launches: the jobs of a sweep, with what they are given."""

import json
from pathlib import Path

import pytest

from hvdtrain.config import Layer
from hvdtrain.errors import ConfigError
from hvdtrain.tools.bench import sweep
from hvdtrain.tools.bench.options import BenchOptions
from hvdtrain.tools.launch import layers_from_json, layers_to_json

LAYERS = [Layer("job.yaml", {"framework": "tf"}, is_file=True), Layer("options", {"batch_size": 8})]


class Launches:
    """Stands for the programs: keeps what they are told and gives what they would find."""

    def __init__(self, monkeypatch, *modules) -> None:
        self.programs: list = []
        self.told: list[list[dict]] = []
        for module in modules:
            monkeypatch.setattr(module, "run_program", self.run)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    def run(self, program, found) -> dict:
        told = [json.loads(Path(command[-1]).read_text()) for command in program.commands]
        assert any(one["found"] == str(found) for one in told)
        assert all(layers_from_json(one["layers"])[:2] == LAYERS for one in told)
        self.programs.append(program)
        self.told.append(told)
        spread = {"median": 0.01, "low": 0.01, "high": 0.01}
        return {
            "mean_step_seconds": spread, "workers": len(self.programs), "threads": 1,
            "samples_per_second": {"median": 100.0, "low": 100.0, "high": 100.0}, "warnings": ["busy"],
            "task": "digits", "device": "TensorFlow on the CPU", "controller": "MPI", "notes": [],
        }  # fmt: skip


def test_layers_survive_the_file_that_workers_read():
    odd = Layer("--set", {"task_options": {"weights": {0: 1.0, 1: 1e-05}, "text": "1e3", "last": None}})
    layers = [*LAYERS, odd]
    assert layers_from_json(json.loads(json.dumps(layers_to_json(layers)))) == layers
    with pytest.raises(ConfigError, match="its values cannot be handed on"):
        layers_to_json([Layer("script", {"task_options": {"model": object()}})])


def test_a_sweep_launches_each_number(monkeypatch):
    launches = Launches(monkeypatch, sweep)
    found = sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), controller="gloo"))
    launchers = [program.commands[0][:-4] for program in launches.programs]
    assert [words[1:] for words in launchers] == [[], ["--gloo", "-np", "2", "-H", "localhost:2"]]
    assert [row["efficiency"]["median"] for row in found["sweep"]] == [1.0, 0.5]


def test_no_folder_is_left(monkeypatch, tmp_path):
    Launches(monkeypatch, sweep)
    monkeypatch.chdir(tmp_path)
    sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), hosts="h1:1,h2:1"))
    assert list(tmp_path.iterdir()) == []
