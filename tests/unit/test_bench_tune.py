"""Tuning: what is tried, what is kept, and what is written."""

import signal
from types import SimpleNamespace

import pytest
import yaml

from hvdtrain.bench import tune as tune_module
from hvdtrain.bench.tune import settings_to_try, tune
from hvdtrain.bench.tuning import Setting, merged
from hvdtrain.config import Layer
from hvdtrain.config_layers import resolve
from hvdtrain.errors import EnvironmentFault, Interrupted

MPI, GLOO = SimpleNamespace(mpi="Open MPI 5.0.11", nccl=False), SimpleNamespace(mpi=None, nccl=False)
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
    noisy = Machine({("threads", 1): 0.95}, noise=(1.0, 1.0, 1.0, 1.0, 1.1, 1.0, 1.0))
    found = tuned(noisy, ("threads", 1))
    assert not found.trials[0].kept
    assert found.gain is None
    assert "nothing changes more than the spread" in found.describe("t.yaml")


def test_a_small_gain_or_a_single_pair_is_not_kept():
    assert not tuned(Machine({("threads", 1): 0.99}), ("threads", 1)).trials[0].kept
    assert not tuned(Machine({("threads", 1): 0.5}), ("threads", 1), repeat=1).trials[0].kept


def test_a_last_comparison_that_fails_loses_nothing():
    machine = Machine({("threads", 1): 0.5})

    def failing(setting):
        if len(machine.runs) == 1 + 2 * 3:
            raise EnvironmentFault("the job ended with exit code 3", "Look at its output.")
        return machine(setting)

    found = tuned(failing, ("threads", 1))
    assert found.gain is None
    assert found.is_written
    text = found.describe("t.yaml")
    assert "warning: all that was kept was not measured together: the job ended with exit code 3" in text
    assert "start the job with" in text


def test_another_order_of_sums_is_named():
    ring = ("mpi_allreduce", "ring")
    values = Setting().changed(*ring).environ.items()
    for workers, is_named in ((2, False), (3, True)):
        machine = Machine(dict.fromkeys(values, 0.8))
        found = tune(LAYERS, [ring], machine, workers=workers, start=Setting(), repeat=2)
        assert ("MPI then sums in another order" in found.describe("t.yaml")) == is_named


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


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(tune_module, "threads_per_worker", lambda workers: 4 // workers)
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)


def test_one_worker_has_nothing_to_reduce(four_cores):
    assert settings_to_try([1], MPI, {}) == [("threads", 1), ("precision", "bf16"), ("compile", True)]


def test_what_the_job_has_is_not_tried_against_itself(four_cores, monkeypatch):
    def values(name: str, has_mpi: bool = True, controller: str | None = None, **given) -> list:
        build = MPI if has_mpi else GLOO
        return [value for one, value in settings_to_try([2], build, given, controller) if one == name]

    assert values("controller") == ["gloo"]  # horovodrun takes MPI if there is
    assert values("controller", controller="mpi") == ["gloo"]
    assert values("controller", controller="gloo") == ["mpi"]
    assert values("controller", has_mpi=False) == []
    assert values("threads") == [1, 4]  # it has two
    assert values("threads", threads=4) == [1, 2]
    assert values("threads", threads=None) == [1, 4]
    assert values("compile", compile=True) == []
    apart = [value for name, value in settings_to_try([1, 1], MPI, {}) if name == "threads"]
    assert apart == [1], "each has the four cores of its host"
    assert values("HOROVOD_CYCLE_TIME") == [0.2, 5]
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    assert values("HOROVOD_CYCLE_TIME") == [0.2]


def test_compressions_that_go_with_the_job_are_tried(four_cores):
    def tried(**given) -> list:
        return [value for name, value in settings_to_try([2], MPI, given) if name == "compression"]

    assert tried() == tried(compression="none") == ["fp16", "bf16", "powersgd:4"]
    assert tried(compression="fp16") == ["bf16", "powersgd:4"]
    assert tried(compression="powersgd:2") == []  # another way would change the curve
    assert tried(sync_every=10) == []  # no gradients travel
    assert tried(compression=4) == tried(), "the job itself says what is wrong with it"


def of_mpi(workers: int, hosts: int = 1, controller: str | None = None, **given) -> list[str]:
    on_hosts = [len(range(host, workers, hosts)) for host in range(hosts)]
    found = settings_to_try(on_hosts, MPI, given, controller)
    return [str(value) for name, value in found if name.startswith("mpi") or name == "controller"]


def test_mpi_is_tried_where_it_can_act_and_before_it_is_compared(four_cores, monkeypatch):
    assert of_mpi(2) == ["gloo"]
    assert of_mpi(3) == ["ring", "gloo"]
    assert of_mpi(3, hosts=3) == ["262144", "ring", "recursive_doubling", "gloo"]
    assert of_mpi(4, hosts=2) == ["262144", "flat", "ring", "recursive_doubling", "gloo"]
    assert of_mpi(3, controller="gloo") == ["mpi", "ring"]
    assert of_mpi(2, outer_optimizer="adasum", sync_every=1) == []
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "eth0")
    monkeypatch.setenv("OMPI_MCA_coll_hcoll_enable", "0")
    assert of_mpi(4, hosts=2) == ["262144", "flat", "ring", "recursive_doubling", "gloo"]
    monkeypatch.setenv("OMPI_MCA_coll_han_priority", "0")
    assert of_mpi(4, hosts=2) == ["262144", "gloo"]
    monkeypatch.setenv("OMPI_MCA_btl_tcp_sndbuf", "65536")
    assert of_mpi(4, hosts=2) == ["gloo"]


def test_a_tree_of_nccl_is_tried_on_gpus(four_cores):
    nccl = SimpleNamespace(mpi=None, nccl=True)
    assert ("NCCL_ALGO", "Tree") in settings_to_try([2], nccl, {})
    assert ("NCCL_ALGO", "Tree") not in settings_to_try([2], nccl, {"device": "cpu"})
    assert ("NCCL_ALGO", "Tree") not in settings_to_try([1], nccl, {})


def test_what_is_kept_of_mpi_is_in_the_command():
    ring, sockets = ("mpi_allreduce", "ring"), ("mpi_socket_bytes", 2**18)
    machine = Machine(
        {("OMPI_MCA_btl_tcp_sndbuf", "262144"): 0.5, ("OMPI_MCA_coll_tuned_allreduce_algorithm", "ring"): 0.5}
    )
    tries = (sockets, ("mpi_allreduce", "recursive_doubling"), ring)
    found = tune(LAYERS, tries, machine, workers=3, start=Setting(), hosts="h1:1,h2:2")
    assert [trial.kept for trial in found.trials] == [True, False, True]
    assert found.command("t.yaml") == (
        "OMPI_MCA_btl_tcp_sndbuf=262144 OMPI_MCA_btl_tcp_rcvbuf=262144 OMPI_MCA_coll_han_priority=0 "
        "OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=ring "
        "horovodrun -np 3 -H h1:1,h2:2 python -m hvdtrain t.yaml"
    )


def test_over_gloo_nothing_of_mpi_is_tried_or_left():
    ring = ("mpi_allreduce", "ring")
    faster = ("OMPI_MCA_coll_tuned_allreduce_algorithm", "ring")
    found = tuned(Machine({faster: 0.5, ("controller", "gloo"): 0.2}), ring, ("controller", "gloo"), ring)
    assert [trial.name for trial in found.trials] == ["mpi_allreduce", "controller"]
    assert found.best == Setting(controller="gloo")


def test_what_changes_the_curve_is_offered_and_not_written():
    low_rank = ("compression", "powersgd:4")
    found = tuned(Machine({low_rank: 0.5, ("threads", 1): 0.8}), low_rank, ("threads", 1))
    assert (found.trials[0].kept, found.trials[0].offered) == (False, True)
    assert found.best.fields == {"threads": 1}
    assert found.trials[1].ratio.median == pytest.approx(0.8)  # beside the job without it
    text = found.describe("t.yaml")
    assert "compression powersgd:4" in text
    assert "faster, not kept: it changes the curve" in text
    assert "powersgd" not in found.to_yaml()
    assert not tuned(Machine({low_rank: 0.99}), low_rank).trials[0].offered


def test_without_a_gain_together_nothing_is_written():
    # the last six runs are of the job as it is and of the best setting, which gain no more
    noisy = Machine({("threads", 1): 0.9}, noise=[*7 * [1.0], 1.3, *5 * [1.0]])
    found = tuned(noisy, ("threads", 1))
    assert found.trials[0].kept
    assert not found.is_faster
    text = found.describe("t.yaml")
    assert "together it gains no more than the spread: no file is written" in text
    assert "start the job with" not in text
    assert found.to_document()["is_faster"] is False


def test_pairs_change_their_order():
    machine = Machine({})
    tuned(machine, ("threads", 1))
    assert [bool(setting.fields) for setting in machine.runs] == [
        False,
        True,
        False,
        False,
        True,
        True,
        False,
    ]


def test_runs_beside_something_else_are_said():
    machine = Machine({})

    def measure(setting: Setting) -> dict:
        return {**machine(setting), "warnings": ["h1 was busy"] if len(machine.runs) < 3 else []}

    found = tune(LAYERS, [("threads", 1)], measure, workers=2, start=Setting())
    assert "warning: 2 of 7 runs: h1 was busy" in found.describe("t.yaml")


def test_a_path_is_one_word_of_the_command():
    found = tuned(Machine({("threads", 1): 0.5}), ("threads", 1))
    assert found.command("my job.yaml") == "horovodrun -np 2 python -m hvdtrain 'my job.yaml'"


def test_later_layers_replace_alternatives():
    assert merged(LAYERS) == {"framework": "torch", "steps": 50}
    layers = [Layer("a", {"task_options": {"x": 1}}), Layer("b", {"task_options": {"y": 2}})]
    assert merged(layers) == {"task_options": {"x": 1, "y": 2}}
    layers = [Layer("a", {"task_options": {"x": {"y": 1}}}), Layer("b", {"task_options": {"x": {"z": 2}}})]
    found = merged(layers)
    assert found == {"task_options": {"x": {"y": 1, "z": 2}}}, "as the job that was measured has it"
    assert resolve([Layer("c", {"framework": "torch"}), *layers]).task_options == found["task_options"]


def test_how_long_it_takes_and_each_result_are_said_as_they_come(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tune_module.time, "monotonic", lambda: now[0])
    machine, said = Machine({("threads", 1): 0.5}), []

    def measure(setting: Setting) -> dict:
        now[0] += 10.0
        return machine(setting)

    tries = [("threads", 1), ("compile", True)]
    tune(LAYERS, tries, measure, workers=2, start=Setting(), say=said.append)
    assert said[:3] == [
        "2 settings to try, each in 3 pairs of runs; first the job as it is ...",
        "it took 10 s: up to 19 runs take about 3 minutes",
        "threads 1 ...",
    ]
    assert said[3].startswith("  threads 1")
    assert said[3].endswith("0.50 (0.50 to 0.50)  kept")
    assert said[5].startswith("  compile True")


def interrupted_after(runs: int, machine: Machine):
    def measure(setting: Setting) -> dict:
        if len(machine.runs) == runs:
            raise Interrupted(signal.SIGTERM)
        return machine(setting)

    return tune(LAYERS, [("threads", 1), ("compile", True)], measure, workers=2, start=Setting())


def test_what_was_found_before_a_signal_is_kept():
    found = interrupted_after(9, Machine({("threads", 1): 0.5}))
    assert (found.is_written, found.is_faster, len(found.trials)) == (True, False, 1)
    assert found.interruption.exit_code == 128 + signal.SIGTERM
    text = found.describe("t.yaml")
    assert "interrupted (SIGTERM): nothing else was tried" in text
    assert "what was kept did not run together beside the job as it was" in text
    assert "written to t.yaml; start the job with:" in text
    assert found.to_document()["interrupted"] is True
    assert yaml.safe_load(found.to_yaml())["threads"] == 1


def test_a_signal_before_anything_was_kept_leaves_no_file():
    found = interrupted_after(9, Machine({}))
    assert not found.is_written
    assert found.describe("t.yaml").endswith("nothing of these is kept: no file is written")
    for runs in (0, 3):
        with pytest.raises(Interrupted):
            interrupted_after(runs, Machine({}))
