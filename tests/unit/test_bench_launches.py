"""What bench launches: the programs of a sweep, a comparison and a tuning, with what they are told."""

import json
import signal
from pathlib import Path

import pytest
import yaml

from hvdtrain.bench import against, command, sweep, tune_job
from hvdtrain.bench.options import BenchOptions
from hvdtrain.bench.worker import layers_from_json, layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import ConfigError, Interrupted, UsageError

LAYERS = [Layer("job.yaml", {"framework": "tf"}, is_file=True), Layer("options", {"batch_size": 8})]


class Launches:
    """Stands for the programs: keeps what they are told and gives what they would find."""

    def __init__(self, monkeypatch, *modules) -> None:
        self.programs: list = []
        self.told: list[list[dict]] = []
        self.loss = 2.3
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
            "first_loss": self.loss, "chunk_seconds": spread, "mean_step_seconds": spread,
            "samples_per_second": {"median": 100.0, "low": 100.0, "high": 100.0}, "warnings": ["busy"],
            "task": "digits", "device": "TensorFlow on the CPU", "controller": "MPI", "version": 1,
        }  # fmt: skip

    def names(self) -> list[str]:
        return [told[0]["program"] for told in self.told]


def quiet(_: str) -> None:
    """Show nothing."""


def test_layers_survive_the_file_that_workers_read():
    odd = Layer("--set", {"task_options": {"weights": {0: 1.0, 1: 1e-05}, "text": "1e3", "last": None}})
    layers = [*LAYERS, odd]
    assert layers_from_json(json.loads(json.dumps(layers_to_json(layers)))) == layers
    with pytest.raises(ConfigError, match="its values cannot be handed on"):
        layers_to_json([Layer("script", {"task_options": {"model": object()}})])


def test_a_sweep_launches_each_number(monkeypatch):
    launches = Launches(monkeypatch, sweep)
    found = sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), controller="gloo", repeat=2), quiet)
    launchers = [program.commands[0][:-4] for program in launches.programs]
    assert [words[1:] for words in launchers] == 2 * [[], ["--gloo", "-np", "2", "-H", "localhost:2"]]
    assert [row.efficiency.median for row in found.rows] == [1.0, 0.5]
    assert found.describe().count("warning: busy") == 1
    assert [row["workers"] for row in found.to_document()["sweep"]] == [1, 2]


def test_programs_are_started_in_turn(monkeypatch):
    launches = Launches(monkeypatch, against)
    found = against.run_against(LAYERS, BenchOptions(against="mwms", repeat=3, seconds=1.0), quiet)
    pair = ["hvdtrain", "mwms"]
    assert launches.names() == [*pair, *reversed(pair), *pair]  # what comes first may have it better
    told = launches.told[1]
    assert [one["place"]["rank"] for one in told] == [0, 1]
    assert told[0]["place"]["ports"] == told[1]["place"]["ports"]
    assert len(set(told[0]["place"]["ports"])) == 2
    assert told[0]["place"]["store"] == told[1]["place"]["store"] != launches.told[2][0]["place"]["store"]
    assert {one["steps"] for one in told} == {100}  # of the time that hvdtrain's steps take
    assert found.ratio.median == 1.0
    assert "ratio      1.00 (1.00 to 1.00) of 3 pairs; no difference beyond the spread" in found.describe()
    assert found.to_document()["against"] == "mwms"


def test_horovods_own_optimizer_is_launched_as_the_job_is(monkeypatch):
    launches = Launches(monkeypatch, against)
    against.run_against(LAYERS, BenchOptions(against="horovod", repeat=1, controller="gloo"), quiet)
    words = [program.commands[0][1:4] for program in launches.programs]
    assert words == 2 * [["--gloo", "-np", "2"]]


def test_other_work_ends_the_comparison(monkeypatch):
    launches = Launches(monkeypatch, against)
    run = launches.run

    def other(program, found):
        launches.loss = 2.4 if program.name != "hvdtrain" else 2.3
        return run(program, found)

    monkeypatch.setattr(against, "run_program", other)
    with pytest.raises(UsageError, match="do not do the same work"):
        against.run_against(LAYERS, BenchOptions(against="mwms"), quiet)
    assert len(launches.programs) == 2


def test_settings_reach_the_jobs_that_are_tuned(monkeypatch):
    launches = Launches(monkeypatch, tune_job)
    tries = [("controller", "gloo"), ("HOROVOD_CYCLE_TIME", 5), ("threads", 1)]
    monkeypatch.setattr(tune_job, "settings_to_try", lambda *_: tries)
    found = tune_job.run_tune(LAYERS, BenchOptions(tune=Path("t.yaml"), repeat=1), quiet)
    assert [trial.name for trial in found.trials] == ["controller", "HOROVOD_CYCLE_TIME", "threads"]
    assert found.gain is None
    changed = [launches.programs[place] for place in (1, 3)]  # with one pair each, the setting comes first
    assert "--gloo" in changed[0].commands[0]
    assert "--gloo" not in launches.programs[2].commands[0]
    assert changed[1].environ == {"HOROVOD_CYCLE_TIME": "5"}
    assert layers_from_json(launches.told[5][0]["layers"])[2].values == {"threads": 1}
    assert len(launches.told) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_a_tuning_has_found(number, monkeypatch, tmp_path, capsys):
    launches = Launches(monkeypatch, tune_job)
    run = launches.run

    def interrupted(program, found):
        if len(launches.programs) == 8:
            signal.raise_signal(number)
        values = json.loads(Path(program.commands[0][-1]).read_text())["layers"]
        seconds = 0.005 if "threads" in str(values) else 0.01
        return run(program, found) | {"chunk_seconds": {"median": seconds}}

    monkeypatch.setattr(tune_job, "run_program", interrupted)
    monkeypatch.setattr(tune_job, "settings_to_try", lambda *_: [("threads", 1), ("compile", True)])
    file, document = tmp_path / "t.yaml", tmp_path / "t.json"
    with pytest.raises(Interrupted) as error:
        command.run_bench(LAYERS, BenchOptions(tune=file, json_path=document))
    assert error.value.exit_code == 128 + number
    assert yaml.safe_load(file.read_text()) == {"framework": "tf", "batch_size": 8, "threads": 1}
    found = json.loads(document.read_text())
    assert (found["interrupted"], [one["kept"] for one in found["trials"]]) == (True, [True])
    said = capsys.readouterr()
    assert f"interrupted ({number.name}): nothing else was tried" in said.out
    assert "nothing was written" not in said.err


def test_a_tuning_on_several_hosts_starts_there(monkeypatch, tmp_path):
    launches = Launches(monkeypatch, tune_job)
    monkeypatch.chdir(tmp_path)
    asked = []

    def tries(on_hosts, build, given, controller):
        asked.append(on_hosts)
        return [("mpi_allreduce", "ring")]

    monkeypatch.setattr(tune_job, "settings_to_try", tries)
    options = BenchOptions(tune=Path("t.yaml"), repeat=1, num_proc=3, hosts="h1:1,h2:4")
    tune_job.run_tune(LAYERS, options, quiet)
    assert asked == [[1, 2]]
    assert all("h1:1,h2:4" in program.commands[0] for program in launches.programs)
    assert launches.programs[1].environ["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "ring"
    assert list(tmp_path.iterdir()) == []
    said: list[str] = []
    tune_job.run_tune(LAYERS, BenchOptions(tune=Path("t.yaml"), repeat=1, hosts="h1:1,h2:4"), said.append)
    assert (asked[1], said[0]) == ([1, 4], "5 workers on 2 hosts"), "all of their slots"


def test_no_folder_is_left(monkeypatch, tmp_path):
    Launches(monkeypatch, sweep)
    monkeypatch.chdir(tmp_path)
    sweep.run_sweep(LAYERS, BenchOptions(sweep=(1, 2), hosts="h1:1,h2:1"), quiet)
    assert list(tmp_path.iterdir()) == []
