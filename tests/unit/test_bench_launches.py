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


@pytest.fixture
def programs(monkeypatch) -> list:
    """Gives the programs that are launched; what they would find is made up."""
    found = []

    def run(name, command, limit_seconds, to) -> dict:
        specification = json.loads(Path(command[-1]).read_text())
        assert specification["found"] == str(to)
        assert layers_from_json(specification["layers"]) == LAYERS
        found.append(command)
        spread = {"median": 100.0, "low": 100.0, "high": 100.0}
        return {
            "workers": len(found), "threads": 1, "mean_step_seconds": spread, "samples_per_second": spread,
            "device": "TensorFlow on the CPU",
        }  # fmt: skip

    monkeypatch.setattr(sweep, "run_program", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    return found


def test_layers_survive_the_file_that_workers_read():
    odd = Layer("--set", {"task_options": {"weights": {0: 1.0, 1: 1e-05}, "text": "1e3", "last": None}})
    layers = [*LAYERS, odd]
    assert layers_from_json(json.loads(json.dumps(layers_to_json(layers)))) == layers
    with pytest.raises(ConfigError, match="its values cannot be handed on"):
        layers_to_json([Layer("script", {"task_options": {"model": object()}})])


def test_a_sweep_launches_each_number(programs):
    found = sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), controller="gloo"))
    launchers = [command[:-4] for command in programs]
    assert [words[1:] for words in launchers] == [[], ["--gloo", "-np", "2", "-H", "localhost:2"]]
    assert [row["efficiency"]["median"] for row in found["sweep"]] == [1.0, 0.5]


def test_no_folder_is_left(programs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), hosts="h1:1,h2:1"))
    assert list(tmp_path.iterdir()) == []
