"""The command plan: its options, its documents, what it says and refuses."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from support.predictions import DOCUMENT, of_three

from hvdtrain.cli import cli
from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.tools import torch as torch_calls
from hvdtrain.tools.bench import plan, sweep
from hvdtrain.tools.bench.options import USUAL_LINKS, PlanOptions, parse_links
from hvdtrain.tools.bench.plan import check_cluster, check_hosts, make_plan

OVER_MPI = {**DOCUMENT, "controller": "MPI", "warnings": []}


def test_what_is_shown_and_written_is_the_same_plan():
    found = make_plan([DOCUMENT, OVER_MPI], PlanOptions(hosts=8, link=parse_links("1gbit,10gbit/20us")))
    text, document = found.describe(), found.to_document()
    assert "digits with PyTorch on the CPU, 32 samples of each worker in a step; compression none" in text
    assert "its parts explain 26.5 ms: ranges are widened by 13%" in text
    assert [one["workers"] for one in document["predictions"]] == [2, 4, 8, 16] * 4
    first = document["predictions"][0]
    assert (first["controller"], first["link"], first["way"], first["hosts"]) == ("Gloo", "1gbit", "none", 1)
    assert first["step_seconds"]["median"] == pytest.approx(30e-3)
    assert sum(first["part_seconds"].values()) == pytest.approx(30e-3)
    assert first["efficiency"]["median"] == pytest.approx(0.7)
    assert first["samples_per_second"]["median"] == pytest.approx(2 * 32 / 30e-3)
    (one, *_) = document["advice"]
    assert (one["workers"], one["limit"], "a faster link" in one["helps"]) == (16, "bandwidth", True)


SUMS = [{"bytes": size, "horovod_seconds": of_three(20e-3)} for size in (4096, 8192)]


@pytest.mark.parametrize(
    ("parts", "seconds", "others", "limit"),
    [
        ({"compute": 60e-3}, 62e-3, {}, ""),
        ({"data": 50e-3}, 80e-3, {}, "waiting for data"),
        ({"slowest": 30e-3}, 60e-3, {}, "waiting for the slowest worker"),
        ({}, 45e-3, {"all_reduce": SUMS}, "latency: small messages one after the other"),
        ({}, 60e-3, {}, "copies and other work of the exchange"),
    ],
)
def test_what_limits_the_largest_job_is_named(parts, seconds, others, limit):
    measured = DOCUMENT["part_seconds"] | {name: of_three(value) for name, value in parts.items()}
    job = {**DOCUMENT, "part_seconds": measured, "mean_step_seconds": of_three(seconds), **others}
    document = make_plan([job], PlanOptions(hosts=1)).to_document()
    assert document["advice"][0]["limit"] == limit
    assert bool(document["advice"][0]["helps"]) == bool(limit)


@pytest.mark.parametrize(
    ("hosts", "slots", "options", "said"),
    [
        (2, 1, PlanOptions(link=()), "sums over the network of 2 hosts do not show"),
        (1, 2, PlanOptions(slots=4), "--slots 4: 2 workers of a host are measured here"),
        (1, 2, PlanOptions(hosts=1, slots=1), "--hosts 1 with 1 worker each leave nothing to predict"),
        (1, 2, PlanOptions(hosts=1, link=USUAL_LINKS), "no message takes a link"),
    ],
)
def test_what_does_not_follow_from_a_measurement_is_refused(hosts, slots, options, said):
    with pytest.raises(UsageError, match=said) as error:
        check_cluster(hosts, slots, options)
    assert error.value.everywhere


def test_the_network_that_was_measured_is_predicted_from_two_hosts_on():
    (table,) = make_plan([{**DOCUMENT, "hosts": 2, "slots": 1}], PlanOptions(hosts=4)).tables
    assert table.title == "Gloo, the network that was measured"
    assert [row.cluster.workers for row in table.rows] == [2, 4]


def test_sparse_gradients_are_refused():
    dense = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))
    torch_calls.check_dense(SimpleNamespace(model=dense))
    sparse = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UsageError, match="1 has sparse gradients"):
        torch_calls.check_dense(SimpleNamespace(model=sparse))


def test_hosts_that_differ_are_refused():
    check_hosts(PlanOptions(), ["h1", "h1", "h2", "h2"], [2, 2, 2, 2])
    with pytest.raises(UsageError, match="different numbers of workers") as error:
        check_hosts(PlanOptions(), ["h1", "h1", "h2"], [2, 2, 1])
    assert "-H h1:1,h2:1" in error.value.remedy
    assert error.value.everywhere
    with pytest.raises(UsageError, match=r"hosts have the same name \(localhost\)"):
        check_hosts(PlanOptions(), ["localhost"] * 4, [2] * 4)


@pytest.fixture
def launches(monkeypatch):
    """Gives the jobs that are launched on a host of four cores; each finds something unless it is refused."""
    specifications = []

    def run_module(name, launcher, module, values, *_):
        specifications.append(values)
        controller = launcher[2]
        if controller in run_module.failing:
            raise EnvironmentFault(f"{name} ended with exit code 1", "no shared memory")
        return json.loads(json.dumps(OVER_MPI if controller == "mpi" else DOCUMENT))

    run_module.failing = ()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(plan, "installed_build", type("Build", (), {"mpi": "Open MPI"}))
    monkeypatch.setattr(sweep, "run_module", run_module)
    monkeypatch.setattr(plan, "horovodrun", lambda *words: list(map(str, words)))
    return SimpleNamespace(specifications=specifications, run=run_module)


def test_a_job_is_launched_over_each_controller(launches, capsys):
    layers = [Layer("options", {"framework": "torch", "task_options": {"hidden": [8, 4]}})]
    found = plan.measure_here(layers, PlanOptions(seconds=3.0))
    said = "".join(f"measuring 4 workers over {name} ...\n" for name in ("gloo", "mpi"))
    assert capsys.readouterr().err == said
    assert [one["request"] for one in launches.specifications] == 2 * [{"seconds": 3.0, "plan": True}]
    assert [one["controller"] for one in found] == ["Gloo", "MPI"]
    assert len(plan.measure_here(layers, PlanOptions(num_proc=2, controller="mpi"))) == 1


def test_what_was_measured_is_kept_if_another_job_fails(launches):
    launches.run.failing = ("mpi",)
    (found,) = plan.measure_here([], PlanOptions())
    assert found["notes"][-1] == "left out: the job with 4 workers over mpi ended with exit code 1"
    with pytest.raises(EnvironmentFault, match="4 workers over mpi"):
        plan.measure_here([], PlanOptions(controller="mpi"))


def test_what_plan_launches_itself_is_not_chosen_under_a_launcher(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for options in (PlanOptions(num_proc=2), PlanOptions(controller="mpi")):
        with pytest.raises(UsageError, match="is for jobs that plan launches itself"):
            plan.run_plan([], options)


def test_each_worker_needs_a_gpu_or_a_core(launches, monkeypatch):
    with pytest.raises(UsageError, match="this host has one GPU") as error:
        plan.measure_here([], PlanOptions(), gpus=1)
    assert "--device cpu" in error.value.remedy
    with pytest.raises(UsageError, match="8 workers need a slot each"):
        plan.measure_here([], PlanOptions(num_proc=8))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError, match="this host has one core"):
        plan.measure_here([], PlanOptions())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--global-batch-size", "64"], "a worker's batch shrinks"),
        (["--shard", "optimizer"], "shard optimizer cannot be used by plan"),
        (["--task", "task.py:OwnStep"], "the task's own torch_step"),
    ],
)
def test_what_is_not_predicted_is_refused_before_anything_starts(words, said, monkeypatch, tmp_path):
    own = "class OwnStep:\n    def torch_step(self, model, batch):\n        pass\n"
    (tmp_path / "task.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "measure_here", mock.Mock(side_effect=AssertionError("workers started")))
    result = CliRunner().invoke(cli, ["plan", "--framework", "torch", *words])
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
