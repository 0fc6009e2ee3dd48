"""The command plan: its options, its documents, what it says and refuses."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from click.testing import CliRunner
from support.predictions import MEASURED, MIB, sure

from hvdtrain.bench import predict_command, predict_launch, predict_measure, predict_worker
from hvdtrain.bench.predict_cluster import check_cluster
from hvdtrain.bench.predict_evidence import evidence_of, read_evidence
from hvdtrain.bench.predict_link import parse_link
from hvdtrain.bench.predict_notes import notes_on_sizes
from hvdtrain.bench.predict_options import USUAL_LINKS, PlanOptions
from hvdtrain.bench.predict_picture import draw_plan
from hvdtrain.bench.predict_record import Record, record_from
from hvdtrain.bench.predict_result import describe_rounded, make_plan
from hvdtrain.bench.predict_scope import (
    EVERY,
    RANK,
    Others,
    check_hosts,
    check_predictable,
    check_task,
    check_workers,
)
from hvdtrain.bench.spread import Spread
from hvdtrain.cli import cli
from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.jobs.setup import JobSpec

RECORD = Record("digits", "PyTorch on the CPU", "none", MEASURED, 10**6, ["h1 was busy"], ["a note"])


def invoke(*words: str):
    return CliRunner().invoke(cli, ["plan", *words])


@pytest.fixture
def measured(tmp_path) -> Path:
    """Gives a file of measurements over both controllers, as plan writes it."""
    over_mpi = replace(RECORD, measured=replace(MEASURED, controller="MPI"))
    path = tmp_path / "measured.json"
    plan = make_plan([evidence_of(RECORD), evidence_of(over_mpi)], PlanOptions(hosts=2))
    path.write_text(json.dumps(plan.to_document()))
    return path


def test_a_measurement_comes_back_from_its_document():
    document = json.loads(json.dumps(RECORD.to_document()))
    again = record_from(document).to_document()
    assert json.loads(json.dumps(again)) == document
    over_network = replace(RECORD, measured=replace(MEASURED, raw=None))
    assert record_from(json.loads(json.dumps(over_network.to_document()))).measured.raw is None


def test_a_plan_is_computed_again_without_measuring(measured, tmp_path):
    to = tmp_path / "plan.json"
    result = invoke("--from", str(measured), "--hosts", "8", "--link", "1gbit,10gbit/20us", "--json", str(to))
    assert result.exit_code == 0, result.output
    text = result.output
    assert "plan: digits with PyTorch on the CPU, 32 samples of each worker in a step" in text
    assert "check: 2 workers from its parts: predicted 26 ms, measured 30 ms" in text
    assert "ranges are widened by 15%" in text
    for title in ("Gloo, 1gbit", "Gloo, 10gbit/20us", "MPI, 1gbit", "MPI, 10gbit/20us"):
        assert f"  {title} between hosts" in text
    assert text.count("16 workers: limited by") == 4
    assert [text.count(f"warning: over {name}: h1 was busy") for name in ("Gloo", "MPI")] == [1, 1]
    assert text.count("a note") == 1
    document = json.loads(to.read_text())
    assert [one["workers"] for one in document["predictions"]][:: len(MEASURED.ways)] == [2, 4, 8, 16] * 4
    first = document["predictions"][0]
    assert (first["controller"], first["link"], first["way"], first["hosts"]) == ("Gloo", "1gbit", "none", 1)
    assert first["step_seconds"]["median"] == pytest.approx(30e-3)
    assert sum(first["part_seconds"].values()) == pytest.approx(30e-3)
    assert first["efficiency"]["median"] == pytest.approx(0.7)
    assert first["samples_per_second"]["median"] == pytest.approx(2 * 32 / 30e-3)
    again = [one.to_document() for one in read_evidence(to)]
    assert json.loads(json.dumps(again)) == document["measurements"]
    assert len(document["advice"]) == 4


@pytest.mark.parametrize("words", [["--batch-size", "8"], ["--set", "seed=3"], ["--framework", "torch"]])
def test_a_measured_job_cannot_be_changed(words, measured):
    result = invoke("--from", str(measured), *words)
    assert isinstance(result.exception, UsageError)
    assert "cannot be changed" in result.exception.problem


def test_the_way_of_the_job_comes_first():
    own = replace(RECORD, own_way="powersgd:4")
    (table,) = make_plan([evidence_of(own)], PlanOptions(hosts=2, link=PlanOptions().link)).tables[:1]
    assert table.rows[0][0].way.name == "powersgd:4"
    assert len(table.rows[0]) == len(MEASURED.ways)


def test_checks_need_two_numbers_of_workers():
    other = replace(RECORD, measured=replace(MEASURED, workers=4, slots=4))
    assert [(one.workers, one.source) for one in evidence_of(other).checks] == [(4, 4)]
    found = evidence_of(other, RECORD)
    assert [(one.workers, one.source) for one in found.checks] == [(4, 4), (2, 4), (4, 2)]
    assert found.error == max(one.error for one in found.checks)


def test_a_disturbed_measurement_of_half_the_workers_is_said():
    other = replace(RECORD, measured=replace(MEASURED, workers=4, slots=4), warnings=[])
    plan = make_plan([evidence_of(other, RECORD)], PlanOptions(hosts=2))
    assert "  warning: over Gloo: measurement of 2 workers: h1 was busy" in plan.describe()


def test_the_network_that_was_measured_is_predicted_from_two_hosts_on():
    over = replace(RECORD, measured=replace(MEASURED, hosts=2, slots=1, raw=None))
    (table,) = make_plan([evidence_of(over)], PlanOptions(hosts=4)).tables
    assert table.title == "Gloo, the network that was measured"
    assert [row[0].cluster.workers for row in table.rows] == [2, 4]


@pytest.mark.parametrize(
    ("hosts", "slots", "options", "said"),
    [
        (2, 1, PlanOptions(link=()), "sums over the network of 2 hosts do not tell"),
        (1, 2, PlanOptions(slots=4), "--slots 4: 2 workers of a host are measured here"),
        (1, 2, PlanOptions(hosts=1, slots=1), "--hosts 1 with 1 worker each: there is nothing to predict"),
        (2, 2, PlanOptions(hosts=1), "there is nothing to predict"),
        (2, 4, PlanOptions(slots=2), "2 hosts were measured with 4 workers each"),
        (1, 2, PlanOptions(hosts=1, link=USUAL_LINKS), "no message takes a link"),
    ],
)
def test_what_a_measurement_does_not_tell_is_refused(hosts, slots, options, said):
    with pytest.raises(UsageError, match=said) as error:
        check_cluster(hosts, slots, options)
    assert error.value.everywhere
    if options.slots == 4:
        assert error.value.remedy.startswith("Give --slots 1 to 2 or leave it out")


def test_links_that_need_large_windows_are_said():
    said = "10gbit/50ms is full with 119 MiB under way: TCP connections with smaller windows take longer"
    for link, is_said in (("10gbit/50ms", True), ("10gbit/1ms", False), ("100gbit", False)):
        plan = make_plan([evidence_of(RECORD)], PlanOptions(hosts=2, link=(parse_link(link),)))
        assert (said in plan.describe()) == is_said
        assert any(said in text for text in plan.to_document()["notes"]) == is_said


def test_steps_of_more_samples_than_there_are_data_are_said():
    few = replace(RECORD, data_samples=100)
    plan = make_plan([evidence_of(few)], PlanOptions(hosts=4))
    assert "from 4 workers on, one step has more samples than the training data (100)" in plan.describe()
    assert "training data (" not in make_plan([evidence_of(RECORD)], PlanOptions(hosts=4)).describe()


def test_on_gpus_the_table_names_nccl():
    on_gpu = replace(RECORD, measured=replace(MEASURED, on_gpu=True))
    (table, *_) = make_plan([evidence_of(on_gpu)], PlanOptions(hosts=2)).tables
    assert table.title == "Gloo with NCCL, 1gbit between hosts"


def test_on_one_host_there_is_one_table(measured):
    result = invoke("--from", str(measured), "--hosts", "1")
    assert result.exit_code == 0, result.output
    assert result.output.count("workers  hosts") == 2  # one for each controller
    assert "  Gloo, one host; measured on a busy machine, see the warnings\n" in result.output


@pytest.mark.parametrize(
    ("spread", "said"),
    [
        (Spread(6423.0, 5987.0, 7012.0), "6,400 (6,000 to 7,000)"),
        (Spread(0.01234, 0.01, 0.02), "0.012 (0.010 to 0.020)"),
        (Spread(123456.0, 60000.0, 400000.0), "120,000 (60,000 to 400,000)"),
        (Spread(2e6, 12345.0, 8.1e6), "2,000,000 (10,000 to 8,000,000)"),
        (Spread(3.0, 0.04, 9.0), "3 (0.04 to 9)"),
        (sure(30.0), "30.00 (30.00 to 30.00)"),
        (sure(0.0), "0 (0 to 0)"),
    ],
)
def test_no_more_digits_are_said_than_the_range_supports(spread, said):
    assert describe_rounded(spread) == said


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measurements": []}', '{"measurements": [{"measured": {}}]}', "1"]
)
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="it is not a document that plan --json writes"):
        read_evidence(path)
    with pytest.raises(UsageError) as error:
        read_evidence(path)
    assert "Error" not in str(error.value), "no names of Python"


def test_files_of_other_versions_are_refused(measured):
    document = json.loads(measured.read_text()) | {"version": 1}
    measured.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="it is of version 1, and only 2 is known here"):
        read_evidence(measured)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_evidence(tmp_path / "missing.json")


def config(**values) -> Config:
    return Config(framework="torch", **values)


class OwnStep:
    def torch_step(self):
        """Stand for a training step of the task's own."""


class OwnOptimizer:
    def torch_optimizer(self, model):
        """Stand for an optimizer of the task's own."""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"global_batch_size": 64}, "a worker's batch shrinks"),
        ({"sync_batch_norm": True}, "messages in every batch-norm layer"),
        ({"compression": "bf16"}, "no measured sums"),
        ({"shard": "optimizer"}, "gathers parameters in every step"),
    ],
)
def test_what_is_not_predicted_is_refused(values, said):
    with pytest.raises(UsageError, match=said) as error:
        check_predictable(config(**values))
    assert error.value.remedy
    assert error.value.everywhere


def test_what_is_predicted_is_not_refused():
    check_predictable(config(accumulate=4, compression="powersgd:2", precision="bf16"))
    check_task(config(), OwnOptimizer())
    check_workers(2)


def test_own_steps_and_lone_workers_are_refused():
    with pytest.raises(UsageError, match="own torch_step may sum gradients several times"):
        check_task(config(), OwnStep())
    with pytest.raises(UsageError, match="this job has one"):
        check_workers(1)


def test_hosts_that_differ_are_refused():
    check_hosts(["h1", "h1", "h2", "h2"], [2, 2, 2, 2])
    with pytest.raises(UsageError, match="different numbers of workers") as error:
        check_hosts(["h1", "h1", "h2"], [2, 2, 1])
    assert "-H h1:1,h2:1" in error.value.remedy
    assert error.value.everywhere
    with pytest.raises(UsageError, match=r"hosts have the same name \(localhost\)") as error:
        check_hosts(["localhost"] * 4, [2] * 4)
    assert error.value.everywhere


class SomeWorkers:
    is_elastic = False


@pytest.mark.parametrize(
    ("values", "task", "found"),
    [
        ({}, object(), Others(RANK, EVERY, "none")),
        ({"compression": "fp16"}, object(), Others(RANK, EVERY, "fp16")),
        ({"compression": "powersgd:2"}, object(), Others(2, EVERY, "powersgd:2")),
        ({"sync_every": 25}, object(), Others(RANK, 25, "sync-every 25")),
        ({}, OwnOptimizer(), Others(RANK, None, "none")),
    ],
)
def test_ways_are_the_jobs_own_and_those_it_can_have(values, task, found):
    assert Others.of(config(**values), task, SomeWorkers()) == found


def test_local_steps_that_the_job_cannot_have_are_refused():
    with pytest.raises(
        ConfigError, match=r"sync_every 25: how much the optimizer of torch_optimizer\(\) keeps"
    ):
        Others.of(config(sync_every=25), OwnOptimizer(), SomeWorkers())


@pytest.fixture
def handed_on(monkeypatch):
    """Gives the layers and options that a command line hands on, without measuring."""
    found: list = []
    monkeypatch.setattr(predict_command, "run_plan", lambda layers, options: found.extend((layers, options)))

    def get(*words: str):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        return found

    return get


def test_options_of_the_job_and_of_plan_are_told_apart(handed_on):
    layers, options = handed_on(
        *("--framework", "torch", "--batch-size", "8", "--set", "seed=3", "--hosts", "16"),
        *("--link", "1gbit,1gbit,200mbit", "--seconds", "3", "-np", "4", "--controller", "mpi"),
    )
    assert layers[1].values == {"framework": "torch", "batch_size": 8}
    assert layers[0].values == {"seed": 3}
    assert [link.name for link in options.link] == ["1gbit", "200mbit"]
    assert (options.hosts, options.seconds, options.num_proc, options.controller) == (16, 3.0, 4, "mpi")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link", "fast"], "'fast' is not a link such as 1gbit"),
        (["--link", "1GB/s"], "the units are kbit, mbit and gbit a second, and us, ms and s"),
        (["--hosts", "0"], "0 is not in the range"),
        (["-np", "1"], "1 is not in the range"),
        (["--host", "4"], "No such option '--host'. Did you mean '--hosts'?"),
    ],
)
def test_wrong_options_are_refused_in_words(words, said):
    result = invoke("--framework", "torch", *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "launched", "said"),
    [
        (PlanOptions(source=Path("a.json")), True, "measures nothing, but a launcher"),
        (PlanOptions(num_proc=2), True, "-np is for jobs that plan launches itself"),
        (PlanOptions(controller="mpi"), True, "--controller is for jobs"),
        (PlanOptions(source=Path("a.json"), num_proc=2), False, "-np is for jobs"),
        (PlanOptions(source=Path("a.json"), seconds=20.0), False, "--seconds is how long to measure"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, launched, said):
    with pytest.raises(UsageError, match=said):
        options.check(launched=launched)


def test_files_that_cannot_be_written_are_refused_early():
    with pytest.raises(UsageError, match="the folder /dev/null cannot be made"):
        predict_command.run_plan([], PlanOptions(json_path=Path("/dev/null/a.json")))
    with pytest.raises(UsageError, match="is a folder"):
        predict_command.run_plan([], PlanOptions(json_path=Path("/tmp")))
    with pytest.raises(UsageError, match="no framework is given"):
        predict_command.run_plan([], PlanOptions())


def test_a_plan_is_shown_although_it_cannot_be_written(measured, monkeypatch):
    def write(*_, **__):
        raise OSError(28, "No space left on device", "plan.json")

    monkeypatch.setattr(Path, "write_text", write)
    result = invoke("--from", str(measured), "--json", str(measured.with_name("plan.json")))
    assert "plan: digits with" in result.output
    assert isinstance(result.exception, EnvironmentFault)
    assert "plan.json cannot be written: No space left" in result.exception.problem


def test_a_plan_needs_two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError, match="this host has one core"):
        predict_launch.measure_here([], PlanOptions(), print)
    with pytest.raises(UsageError, match="4 workers need a slot each"):
        predict_launch.measure_here([], PlanOptions(num_proc=4), print)


@pytest.fixture
def launches(monkeypatch):
    """Lets workers measure in this process, on a host of four cores; gives what each job was told."""
    told = []

    def measure_job(layers, seconds):
        told.append((layers, seconds))
        workers = 4 if len(told) % 2 else 2
        return replace(RECORD, measured=replace(MEASURED, workers=workers, slots=workers))

    def run_program(program, found):
        predict_worker.work(json.loads(Path(program.commands[0][-1]).read_text()))
        return json.loads(found.read_text())

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(predict_launch, "installed_build", type("Build", (), {"mpi": "Open MPI"}))
    monkeypatch.setattr(predict_launch, "run_program", run_program)
    monkeypatch.setattr(predict_launch, "horovodrun", lambda *words: list(map(str, words)))
    monkeypatch.setattr(predict_worker, "measure_job", measure_job)
    return told


def test_jobs_are_launched_over_each_controller_with_all_workers_and_half(launches):
    said = []
    layers = [Layer("options", {"framework": "torch", "task_options": {"hidden": [8, 4]}})]
    found = predict_launch.measure_here(layers, PlanOptions(seconds=3.0), said.append)
    assert said == [f"measuring {count} workers over {c} ..." for c in ("gloo", "mpi") for count in (4, 2)]
    assert launches == [(layers, 3.0)] * 4
    assert [[(one.workers, one.source) for one in each.checks] for each in found] == [
        [(4, 4), (2, 4), (4, 2)]
    ] * 2


@pytest.mark.parametrize("failing", [(4, 2), (2,)])
def test_what_was_measured_is_kept_if_another_job_fails(failing, launches, monkeypatch):
    run_program, said = predict_launch.run_program, []

    def run(program, found):
        if program.name in [f"the job with {count} workers over mpi" for count in failing]:
            raise EnvironmentFault(f"{program.name} ended with exit code 1", "no shared memory")
        return run_program(program, found)

    monkeypatch.setattr(predict_launch, "run_program", run)
    found = predict_launch.measure_here([], PlanOptions(), said.append)
    assert len(found) == 2 - (4 in failing)
    assert (
        found[0].record.notes[-1]
        == f"left out: the job with {failing[0]} workers over mpi ended with exit code 1"
    )
    assert [len(one.checks) for one in found] == [3, 1][: len(found)]
    assert any("no shared memory" in text for text in said)
    with pytest.raises(EnvironmentFault, match="4 workers over mpi") if 4 in failing else nullcontext():
        predict_launch.measure_here([], PlanOptions(controller="mpi"), said.append)


def test_a_host_with_gpus_has_a_worker_for_each(launches):
    said = []
    predict_launch.measure_here([], PlanOptions(controller="gloo"), said.append, gpus=2)
    assert said == ["measuring 2 workers over gloo ..."]
    with pytest.raises(UsageError, match="this host has one GPU") as error:
        predict_launch.measure_here([], PlanOptions(), said.append, gpus=1)
    assert "--device cpu" in error.value.remedy
    with pytest.raises(UsageError, match="4 workers need a GPU each; this host has 2"):
        predict_launch.measure_here([], PlanOptions(num_proc=4), said.append, gpus=2)


@pytest.mark.parametrize(
    ("device", "seen", "gpus"),
    [("auto", {"gpus": ["a", "b"]}, 2), ("cpu", {"gpus": ["a"]}, 0), ("auto", {}, 0)],
)
def test_gpus_count_unless_the_job_computes_on_the_cpu(device, seen, gpus, monkeypatch):
    given = []

    def measure_here(*_, gpus):
        given.append(gpus)
        return [evidence_of(RECORD)]

    monkeypatch.setattr(predict_launch, "probe", lambda framework, seconds: seen)
    monkeypatch.setattr(predict_launch, "measure_here", measure_here)
    result = invoke("--framework", "torch", "--device", device)
    assert result.exit_code == 0, result.output
    assert given == [gpus]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--global-batch-size", "64"], "a worker's batch shrinks"),
        (["--set", "batch_sise=3"], "batch_sise"),
        (["--compression", "bf16"], "compression bf16 exchanges parts of gradients"),
        (["--compression", "bf16", "--sync-every", "2"], "sync_every"),
        (["--task", "task.py:OwnStep"], "the task's own torch_step"),
    ],
)
def test_what_is_not_predicted_is_refused_before_anything_starts(words, said, monkeypatch, tmp_path):
    own = "class OwnStep:\n    def torch_step(self, model, batch):\n        pass\n"
    (tmp_path / "task.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        predict_launch, "measure_here", mock.Mock(side_effect=AssertionError("workers started"))
    )
    result = invoke("--framework", "torch", *words)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)


def test_sums_that_were_not_measured_are_said():
    assert notes_on_sizes(16 * MIB, 16 * MIB) == []
    (note,) = notes_on_sizes(4 * MIB, 16 * MIB)
    assert note.startswith("all-reduces of more than 4 MiB were left out")


def test_a_job_on_uneven_hosts_is_refused(monkeypatch):
    """The hosts are compared before anything is measured."""
    workers = SimpleNamespace(size=3, local_size=2, allgather_object=lambda _: [2, 2, 1])
    job = JobSpec(config(), None, "", {})
    monkeypatch.setattr(predict_measure, "prepare", lambda *_: job)
    monkeypatch.setattr(predict_measure, "started", lambda *_: nullcontext(SimpleNamespace(workers=workers)))
    monkeypatch.setattr(predict_measure, "open_together", lambda *_: (None, None, ["h1", "h1", "h2"]))
    with pytest.raises(UsageError, match="different numbers of workers"):
        predict_measure.measure_job([], 1.0)


class Together:
    """Two workers that take equally long."""

    def allgather_object(self, value):
        return [value, value]

    def barrier(self):
        """Wait for nobody."""


@pytest.mark.parametrize(("seconds", "turns"), [(0.01, 17), (30.0, 5), (4.0, 6)])
def test_encoding_is_timed_until_its_time_is_up(seconds, turns, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(predict_measure.time, "perf_counter", lambda: now[0])

    def encode():
        now[0] += seconds

    found = predict_measure._seconds_of(Together(), "fp16", encode)
    assert found.median == pytest.approx(seconds)
    assert now[0] == pytest.approx(turns * seconds)


def test_jobs_are_launched_over_the_controller_that_is_named(launches):
    (found,) = predict_launch.measure_here([], PlanOptions(num_proc=2, controller="mpi"), lambda _: None)
    assert len(launches) == len(found.checks) == 1


def test_a_picture_has_a_part_for_each_controller_and_link():
    over_mpi = replace(RECORD, measured=replace(MEASURED, controller="MPI"))
    document = make_plan([evidence_of(RECORD), evidence_of(over_mpi)], PlanOptions(hosts=2)).to_document()
    grid = [[mock.MagicMock() for _ in range(3)] for _ in range(2)]
    figure = mock.MagicMock(**{"subplots.return_value": grid})
    draw_plan(figure, document)
    assert figure.subplots.call_args.args == (2, 3)
    titles = [axes.set_title.call_args.args[0] for row in grid for axes in row]
    assert titles[::2] == ["Gloo, 1gbit", "Gloo, 100gbit", "MPI, 10gbit"]
    lines = grid[0][0].plot.call_args_list
    assert [line.kwargs["label"] for line in lines] == [way.name for way in MEASURED.ways]
    assert lines[0].args[0] == [2, 4]
    assert lines[0].args[1][0] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "Gloo, one host"),
        ({"on_gpu": True}, "Gloo with NCCL, one host"),
        ({"hosts": 2, "slots": 1}, "Gloo, measured network"),
    ],
)
def test_a_picture_without_a_link_says_what_it_is_of(changes, title):
    record = replace(RECORD, measured=replace(MEASURED, **changes))
    document = make_plan([evidence_of(record)], PlanOptions(hosts=max(1, 2 * record.measured.hosts - 2)))
    axes = mock.MagicMock()
    draw_plan(mock.MagicMock(**{"subplots.return_value": [[axes]]}), document.to_document())
    assert axes.set_title.call_args.args == (title,)
