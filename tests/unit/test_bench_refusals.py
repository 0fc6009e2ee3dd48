"""What bench and plan refuse before they launch anything, and what they say of signals and busy machines."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli import cli
from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import InstalledBuild
from hvdtrain.tools.bench import job, sweep
from hvdtrain.tools.bench import plan_command as predict_command
from hvdtrain.tools.bench.options import BenchOptions, PlanOptions
from hvdtrain.tools.output import check_writable

COMMANDS = [{"sweep": (1, 2)}, {}]


@pytest.fixture
def nothing_starts(monkeypatch):
    def fails(*_):
        raise AssertionError("a program was started")

    monkeypatch.setattr(sweep, "run_program", fails)
    monkeypatch.setattr(job, "started", fails)
    for name in (
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
        "UCX_DEBUG_SIGNO",
    ):  # which a job sets before it starts
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def test_workers_of_an_elastic_job_launch_and_measure_nothing(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "127.0.0.1:1")
    for options in COMMANDS:
        with pytest.raises(UsageError, match="only training can be an elastic job"):
            sweep.run_bench([], BenchOptions(**options))
    for options in (PlanOptions(), PlanOptions(source=Path("plan.json"))):
        with pytest.raises(UsageError, match="only training can be an elastic job") as error:
            predict_command.run_plan([Layer("options", {"framework": "torch"})], options)
    assert error.value.everywhere


@pytest.mark.parametrize("options", COMMANDS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compression": "bf16", "sync_every": 2}, "sync_every"),
        ({"sync_every": 2000}, "bench times whole synchronisations"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_a_job_would_refuse_is_refused_before_it_starts(options, values, said, nothing_starts):
    layers = [Layer("options", {"framework": "torch", **values})]
    with pytest.raises(UsageError, match=said):
        sweep.run_bench(layers, BenchOptions(**options))


def test_a_batch_that_is_too_small_for_one_of_the_jobs_is_refused_before_any_starts(nothing_starts):
    layers = [Layer("options", {"framework": "torch", "global_batch_size": 1})]
    with pytest.raises(UsageError, match="global_batch_size 1 is smaller than workers x accumulate = 2 x 1"):
        sweep.run_bench(layers, BenchOptions(sweep=(1, 2)))


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_controller_that_horovod_lacks_is_refused_before_it_starts(controller, nothing_starts, monkeypatch):
    lacking = InstalledBuild("0.28.1", "2.0", "2.0", None, False, False)
    monkeypatch.setattr(job, "installed_build", lambda: lacking)
    layers = [Layer("options", {"framework": "torch"})]
    said = f"--controller {controller}: Horovod was built without {'MPI' if controller == 'mpi' else 'Gloo'}"
    with pytest.raises(UsageError, match=said):
        sweep.run_bench(layers, BenchOptions(controller=controller, sweep=(1, 2)))
    with pytest.raises(UsageError, match=said):
        predict_command.run_plan(layers, PlanOptions(controller=controller))


@pytest.mark.parametrize("options", [{"sweep": (1, 2)}, {"all_reduce": False}])
def test_a_largest_all_reduce_where_none_is_measured_is_refused(options, nothing_starts):
    with pytest.raises(UsageError, match=r"--max-bytes is the largest all-reduce, and --.* measures none"):
        sweep.run_bench([], BenchOptions(max_bytes=1 << 20, **options))


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


@pytest.mark.parametrize("name", ["/proc/hvdtrain.json", "a" * 300])
def test_a_file_that_the_system_refuses_is_found_before_anything_is_measured(name, tmp_path, monkeypatch):
    """Root may write to /proc by its permissions, and cannot."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="cannot be written: "):
        check_writable(Path(name))
