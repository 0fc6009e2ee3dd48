"""What bench and plan time and compute, which programs they launch and end, and what they refuse."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from click.testing import CliRunner
from support.fakes import FakeLocalBackend, make_loop_session, one_worker
from support.predictions import DOCUMENT, of_three

from hvdtrain.backends.step_metrics import StepMetrics, StepStatistics
from hvdtrain.cli import cli
from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.horovod_build.installed import InstalledBuild
from hvdtrain.jobs.opening.start import JobSpec
from hvdtrain.tools import blocks
from hvdtrain.tools import torch as torch_calls
from hvdtrain.tools.bench import job, plan, sweep
from hvdtrain.tools.bench.job import CpuTimes, busy_hosts, describe_job, doubtful_parts
from hvdtrain.tools.bench.options import USUAL_LINKS, BenchOptions, PlanOptions, parse_links
from hvdtrain.tools.bench.plan import check_cluster, check_hosts, make_plan
from hvdtrain.tools.blocks import Recorder, bench_config, run_block
from hvdtrain.tools.launch import layers_from_json, layers_to_json, run_module
from hvdtrain.tools.output import check_writable
from hvdtrain.tools.spread import Block, Spread, split_of


def test_the_parts_of_a_step_add_up_to_it():
    job = Block([[10.0, 12.0], [10.0, 12.0]], 2.0)
    alone = Block([[4.0, 6.0], [8.0, 2.0]], 0.5)
    found = split_of(job, alone)
    assert found["data"] == 2.0  # of the job
    assert found["compute"] == 5.0 - 0.5
    assert found["slowest"] == (8.0 + 6.0) / 2 - 5.0  # in each step another worker was the slowest
    assert sum(found.values()) == 11.0


def cpu(own: float, busy: float, stolen: float = 0.0, host: str = "h1") -> CpuTimes:
    return CpuTimes(host, 2, 10.0, busy, stolen, own)


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ([cpu(5.0, 20.0), cpu(5.0, 20.0)], "h1 was busy: other processes used 1.0 of its 2 cores"),
        ([cpu(10.0, 10.0, 5.0)], "h1 is a virtual machine that did not get 0.5 of its 2 cores"),
        ([cpu(10.0, 10.0), cpu(1.0, 20.0, host="h2")], "h2 was busy: other processes used 1.9"),
    ],
)
def test_a_busy_machine_is_said(of_ranks, said):
    (found,) = busy_hosts(of_ranks)
    assert found.startswith(said)


RESULT = DOCUMENT | {"threads": 0, "reduction": "fp32", "steps_timed": 50, "step_seconds": of_three(0.01)}
RESULT |= {"mean_step_seconds": of_three(0.01), "samples_per_second": of_three(6400.0)}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Spread(0.0111, 0.009, 0.012), "11.10 (9.00 to 12.00) ms, 111% of it; not trustworthy"),
        (Spread(-0.0035, -0.004, 0.001), "-35% of it; not above the noise; not trustworthy"),
    ],
)
def test_a_part_that_cannot_be_is_not_trustworthy(part, said):
    document = {**RESULT, "part_seconds": {"compute": part.to_dict()}}
    assert said in describe_job(document)
    (warning,) = doubtful_parts(document)
    assert warning.startswith("computing cannot be more than all of a step")


def test_a_sweep_needs_a_slot_for_each_worker(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert sweep.check_slots((1, 2), None) == "localhost:2"
    with pytest.raises(UsageError, match="3 workers need a slot each; this host has 2 cores") as error:
        sweep.check_slots((1, 3), None)
    assert "-H localhost:3" in error.value.remedy
    with pytest.raises(UsageError, match="this host has 2 cores") as error:
        sweep.check_slots((3,), None, may_share=False)
    assert "-H" not in error.value.remedy, "what cannot be given is no remedy"
    assert sweep.check_slots((3,), "localhost:3") == "localhost:3"
    with pytest.raises(UsageError, match="the hosts of -H have 3 slots"):
        sweep.check_slots((4,), "h1:2,h2:1")


def test_what_was_measured_is_shown_before_it_is_written(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "bench_job", lambda *_: RESULT)
    monkeypatch.setattr(sweep, "check_writable", lambda *_, **__: None)
    with pytest.raises(EnvironmentFault, match="/dev/full cannot be written: No space left on device"):
        sweep.run_bench([], BenchOptions(json_path=Path("/dev/full")))
    assert "64 samples a step" in capsys.readouterr().out


def test_layers_survive_the_file_that_workers_read():
    odd = Layer("--set", {"task_options": {"weights": {0: 1.0, 1: 1e-05}, "text": "1e3", "last": None}})
    layers = [Layer("job.yaml", {"framework": "tf"}, is_file=True), odd]
    assert layers_from_json(json.loads(json.dumps(layers_to_json(layers)))) == layers
    with pytest.raises(ConfigError, match="its values cannot be handed on"):
        layers_to_json([Layer("script", {"task_options": {"model": object()}})])


@pytest.fixture
def nothing_starts(monkeypatch):
    def fails(*_):
        raise AssertionError("a program was started")

    monkeypatch.setattr(sweep, "run_module", fails)
    monkeypatch.setattr(job, "started", fails)
    # a job sets these before it starts
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "UCX_DEBUG_SIGNO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def test_workers_of_an_elastic_job_launch_and_measure_nothing(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "127.0.0.1:1")
    for run, options in ((sweep.run_bench, BenchOptions(sweep=(1, 2))), (plan.run_plan, PlanOptions())):
        with pytest.raises(UsageError, match="only training can be an elastic job") as error:
            run([Layer("options", {"framework": "torch"})], options)
        assert error.value.everywhere


@pytest.mark.parametrize("options", [{"sweep": (1, 2)}, {}])
def test_what_a_job_would_refuse_is_refused_before_it_starts(options, nothing_starts):
    for values, said in (({"sync_every": 2000}, "bench times whole"), ({"batch_size": 0}, "batch_size")):
        with pytest.raises(UsageError, match=said):
            sweep.run_bench([Layer("options", {"framework": "torch", **values})], BenchOptions(**options))


def test_what_one_of_the_jobs_would_refuse_is_refused_before_any_starts(nothing_starts, monkeypatch):
    layers = [Layer("options", {"framework": "torch", "global_batch_size": 1})]
    with pytest.raises(UsageError, match="global_batch_size 1 is smaller than workers x accumulate = 2 x 1"):
        sweep.run_bench(layers, BenchOptions(sweep=(1, 2)))
    lacking = InstalledBuild("0.28.1", "2.0", "2.0", None, False, False)
    monkeypatch.setattr(job, "installed_build", lambda: lacking)
    layers = [Layer("options", {"framework": "torch"})]
    for run, options in (
        (sweep.run_bench, BenchOptions(sweep=(1, 2), controller="mpi")),
        (plan.run_plan, PlanOptions(controller="mpi")),
    ):
        with pytest.raises(UsageError, match="--controller mpi: Horovod was built without MPI"):
            run(layers, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": "h1:2"}, "-H is for --sweep"),
        ({"controller": "mpi"}, "--controller is for"),
        ({"max_bytes": 1 << 20, "sweep": (1, 2)}, "--max-bytes is the largest all-reduce"),
        ({"max_bytes": 1 << 20, "all_reduce": False}, "--no-all-reduce measures none"),
        ({"json_path": Path("/tmp")}, "/tmp cannot be written: Is a directory"),
        ({"picture": Path("a.png")}, "--picture is for --sweep"),
        ({"picture": Path("a.txt"), "sweep": (1, 2)}, "must end in .png, .svg, .html"),
    ],
)
def test_options_that_cannot_be_are_refused_before_it_starts(options, said, nothing_starts):
    with pytest.raises(UsageError, match=said):
        sweep.run_bench([], BenchOptions(**options))


@pytest.mark.parametrize("words", ["bench", "plan", "lr-find", "batch-find"])
def test_the_config_file_of_the_job_is_not_replaced(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "framework: torch\n"
    Path("job.yaml").write_text(text)
    found = CliRunner().invoke(
        cli, [words, "job.yaml", "--json", str(tmp_path / "job.yaml")], standalone_mode=False
    )
    assert isinstance(found.exception, UsageError)
    assert "job.yaml is the config file of the job, which would be replaced" in str(found.exception)
    assert Path("job.yaml").read_text() == text


def test_the_check_of_files_leaves_them_as_they_are(tmp_path):
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("before")
    link.symlink_to(tmp_path / "none")
    check_writable(kept, tmp_path / "new", link)
    assert kept.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    assert link.is_symlink()


PAUSE = 0.02


class SlowSynchronizing(FakeLocalBackend):
    """Takes long to make the workers equal, and no time for a step."""

    def __init__(self, workers, now) -> None:
        super().__init__(workers)
        self.now = now

    def synchronize(self):
        self.now.seconds += PAUSE
        return super().synchronize()


def block(tmp_path, backend, steps, **fields):
    session = make_loop_session(tmp_path, backend, epochs=None, steps=10**6, **fields)
    session.services.report = Recorder()
    return session, run_block(session, session.services.report, steps)


@pytest.mark.parametrize("every", [2, 5])
def test_a_synchronisation_counts_in_the_steps_before_it(every, tmp_path, monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(blocks, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    session, (seconds, _) = block(tmp_path, SlowSynchronizing(one_worker(), now), 7, sync_every=every)
    assert seconds == pytest.approx(-(-7 // every) * [PAUSE / every])
    assert session.state.progress.step % every == 0  # the next block begins with equal workers


def test_local_steps_share_the_wait_of_all_of_them():
    recorder = Recorder()
    metrics = SimpleNamespace(mean=lambda _: 2.5, statistics=StepStatistics(0, 6.0))
    recorder.on_step(SimpleNamespace(steps=3), metrics)
    recorder.on_step(SimpleNamespace(steps=1), StepMetrics.from_vector(["loss"], (1.0, *11 * [0.0]), 1.0))
    assert recorder.wait_seconds == [2.0, 2.0, 2.0, 0.0]
    assert recorder.first_loss == 2.5


def test_low_rank_is_measured_as_it_is_after_the_warm_up():
    config = functools.partial(Config, framework="torch")
    found = bench_config(config(compression="powersgd:4", warmup_epochs=2.0, learning_rate=0.1))
    assert (found.warmup_epochs, found.learning_rate) == (0.0, pytest.approx(1e-4))
    assert bench_config(config(compression="powersgd:4", warmup_steps=9)).warmup_steps is None
    assert bench_config(found) == found
    assert bench_config(config(compression="powersgd:4", learning_rate=0.1)).learning_rate == 0.1
    assert bench_config(config(warmup_epochs=2.0, learning_rate=0.1)).warmup_epochs == 2.0


def test_horovod_starts_without_its_timeline(monkeypatch):
    class StartedError(Exception):
        """Stands for a job that starts."""

    def started(job, _):
        seen.append(job)
        raise StartedError

    seen = []
    monkeypatch.setattr(
        job, "prepare", lambda *_: JobSpec(Config(framework="torch", profile="3-5"), None, "", {})
    )
    monkeypatch.setattr(job, "started", started)
    with pytest.raises(StartedError):
        job.bench_job([], job.Request())
    assert seen[0].config.profile is None
    assert "profile is left out" in seen[0].notes[0]


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("print('why it failed'); raise SystemExit(3)", 300, "it ended with exit code 3"),
        ("import time; time.sleep(60)", 0.5, "it did not end within 0 s and was ended"),
    ],
)
def test_a_program_that_fails_is_said_with_its_output(text, limit, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error:
        run_module("it", python(text), "module", {}, tmp_path, limit)
    assert ("why it failed" in error.value.remedy) == ("why" in text)
    assert ("--seconds" in error.value.remedy) == ("did not end" in said)


def test_what_a_process_of_a_program_leaves_behind_is_ended(tmp_path):
    mark = f"child-{tmp_path.name}"
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
    with pytest.raises(EnvironmentFault, match="without a result"):
        run_module("it", python(f"{spawn}{mark!r}])"), "module", {}, tmp_path, 300)
    assert comes_to(mark, is_there=False)


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    mark, wait = f"interrupted-{tmp_path.name}", subprocess.Popen.wait

    def interrupted(process, timeout):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        assert comes_to(mark, is_there=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)  # as a signal comes while it waits
    waits = [*python("import time; time.sleep(600)"), mark]
    with pytest.raises(KeyboardInterrupt):
        run_module("it", waits, "module", {}, tmp_path, 300)
    assert comes_to(mark, is_there=False)


def comes_to(mark: str, is_there: bool) -> bool:
    """Return whether a process with a text in its command comes, or is gone, which may take a moment."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = (" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
        if any(mark in command for command in found) == is_there:
            return True
    return False


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
