"""Tuning: what is tried, what is kept, and what is written."""

import pytest
import yaml

from hvdtrain.bench.tune import Setting, merged, settings_to_try, tune
from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault

LAYERS = [Layer("job.yaml", {"framework": "torch", "epochs": 3}), Layer("options", {"steps": 50})]


class Machine:
    """Gives each setting a step time: a base, times the factor of each thing that was changed."""

    def __init__(self, factors: dict, noise=(1.0,), losses: dict | None = None) -> None:
        self.factors, self.noise, self.losses = factors, noise, losses or {}
        self.runs: list[Setting] = []

    def __call__(self, setting: Setting) -> dict:
        seconds = 0.01 * self.noise[len(self.runs) % len(self.noise)]
        self.runs.append(setting)
        chosen = {**setting.fields, **setting.environ, "controller": setting.controller}
        loss = 2.3
        for name, value in chosen.items():
            factor = self.factors.get((name, value), 1.0)
            if factor is None:
                raise EnvironmentFault(
                    "the job ended with exit code 3", "hvdtrain: no compiler\n  Install one."
                )
            seconds *= factor
            loss = self.losses.get((name, value), loss)
        return {"first_loss": loss, "chunk_seconds": {"median": seconds}}


def tuned(machine: Machine, *tries, repeat: int = 3):
    return tune(LAYERS, tries, machine, workers=2, start=Setting(), repeat=repeat)


def test_what_gains_is_kept_and_what_follows_is_tried_beside_it():
    machine = Machine({("controller", "mpi"): 0.5, ("threads", 1): 0.9, ("HOROVOD_CYCLE_TIME", "5"): 1.2})
    found = tuned(machine, ("controller", "mpi"), ("HOROVOD_CYCLE_TIME", 5), ("threads", 1))
    assert [trial.kept for trial in found.trials] == [True, False, True]
    assert found.trials[2].ratio.median == pytest.approx(0.9)
    assert found.best == Setting({"threads": 1}, {}, "mpi")
    assert found.gain.median == pytest.approx(0.45)  # beside the job as it was
    assert found.command("t.yaml") == "horovodrun --mpi -np 2 python -m hvdtrain t.yaml"
    assert yaml.safe_load(found.to_yaml()) == {"framework": "torch", "steps": 50, "threads": 1}


def test_variables_are_in_the_command():
    found = tuned(Machine({("HOROVOD_CYCLE_TIME", "0.2"): 0.8}), ("HOROVOD_CYCLE_TIME", 0.2))
    assert found.command("t.yaml") == "HOROVOD_CYCLE_TIME=0.2 horovodrun -np 2 python -m hvdtrain t.yaml"
    assert "start the job with" in found.describe("t.yaml")


def test_a_gain_within_the_spread_is_not_kept():
    noisy = Machine({("threads", 1): 0.95}, noise=(1.0, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0))
    found = tuned(noisy, ("threads", 1))
    assert not found.trials[0].kept
    assert found.gain is None
    assert "nothing changes more than the spread" in found.describe("t.yaml")


def test_a_small_gain_or_a_single_pair_is_not_kept():
    assert not tuned(Machine({("threads", 1): 0.99}), ("threads", 1)).trials[0].kept
    assert not tuned(Machine({("threads", 1): 0.5}), ("threads", 1), repeat=1).trials[0].kept


def test_what_cannot_run_is_said():
    found = tuned(Machine({("compile", True): None}), ("compile", True), ("threads", 1))
    assert found.trials[0].problem == "not measured: the job ended with exit code 3. Install one."
    assert found.trials[1].ratio is not None


def test_what_begins_with_another_loss_is_not_kept():
    machine = Machine({("precision", "bf16"): 0.5}, losses={("precision", "bf16"): 1.0})
    found = tuned(machine, ("precision", "bf16"))
    assert "the first loss is 1 in place of 2.3" in found.trials[0].problem
    assert found.gain is None


def test_what_rounds_numbers_is_named():
    found = tuned(Machine({("precision", "bf16"): 0.5}), ("precision", "bf16"))
    assert "note: precision rounds numbers" in found.describe("t.yaml")
    assert found.to_document()["fields"] == {"precision": "bf16"}


def test_a_job_that_fails_as_it_is_ends_the_tuning():
    with pytest.raises(EnvironmentFault, match="exit code 3"):
        tuned(Machine({("controller", None): None}), ("threads", 1))


def test_one_worker_has_nothing_to_reduce(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    names = [name for name, _ in settings_to_try(1, True, {})]
    assert names == ["threads", "threads", "precision", "compile"]
    found = settings_to_try(2, True, {"threads": 2, "compression": "fp16"})
    assert ("controller", "mpi") in found
    assert [value for name, value in found if name == "threads"] == [1, 4]
    assert "compression" not in dict(found)
    assert not any(name == "controller" for name, _ in settings_to_try(2, False, {}))


def test_later_layers_replace_alternatives():
    assert merged(LAYERS) == {"framework": "torch", "steps": 50}
    layers = [Layer("a", {"task_options": {"x": 1}}), Layer("b", {"task_options": {"y": 2}})]
    assert merged(layers) == {"task_options": {"x": 1, "y": 2}}
