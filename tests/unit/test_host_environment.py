"""The variables that are set for Open MPI and Horovod, and those that stay as they are."""

import pytest

from hvdtrain.host import environment
from hvdtrain.host.environment import prepare


@pytest.fixture(autouse=True)
def _four_cores_and_no_launcher(monkeypatch):
    monkeypatch.setattr(environment, "cores_per_worker", lambda local_size: 4 / local_size)
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")


def test_without_a_launcher_gloo_coordinates_the_one_worker():
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "UCX_DEBUG_SIGNO": "0",  # SIGHUP is hvdtrain's
    }


def test_horovod_does_not_end_long_work_that_the_watch_knows_of(launched):
    assert prepare({}, stall_timeout=120) == {"HOROVOD_FUSION_THRESHOLD": "0"}


@pytest.mark.parametrize(
    ("shutdown", "check"), [("30", "15"), ("60", "30"), ("1", "1"), ("61", None), ("0", None), ("soon", None)]
)
def test_a_stall_limit_of_the_user_below_a_minute_acts(launched, shutdown, check):
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": shutdown}
    assert prepare(environ).get("HOROVOD_STALL_CHECK_TIME_SECONDS") == check
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == shutdown


@pytest.mark.parametrize(
    ("local_size", "yields", "nanoseconds"),
    [("1", False, None), ("2", False, None), ("3", True, None), ("4", True, None), ("16", True, "200000")],
)
def test_open_mpi_yields_if_threads_outnumber_cores_and_sleeps_if_workers_do(
    launched, local_size, yields, nanoseconds
):
    set_for_user = prepare({"OMPI_COMM_WORLD_LOCAL_SIZE": local_size})
    assert (set_for_user.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    strategy = set_for_user.get("OMPI_MCA_threads_pthreads_yield_strategy")
    assert strategy == ("nanosleep" if nanoseconds else None)
    assert set_for_user.get("OMPI_MCA_threads_pthreads_nanosleep_time") == nanoseconds


@pytest.mark.parametrize(
    ("tasks", "node", "yields"),
    [("2(x3),1", "0", False), ("3,2(x2)", "0", True), ("2(x2),3", "2", True), ("3,1", "1", False)],
)
def test_workers_of_srun_count_as_those_of_mpirun(launched, tasks, node, yields):
    set_for_user = prepare({"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert (set_for_user.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields


def test_what_the_user_set_is_not_changed(launched):
    environ = {
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "HOROVOD_FUSION_THRESHOLD": "1000000",
        "UCX_DEBUG_SIGNO": "1",
    }
    kept = dict(environ)
    assert prepare(environ) == {}
    assert environ == kept


def test_over_gloo_workers_wait_longer_for_a_slow_start(launched):
    set_for_user = prepare({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"})
    assert set_for_user["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "60"


@pytest.mark.parametrize(("size", "expected"), [("4", "60"), ("2", None)])
def test_over_mpi_between_hosts_data_over_gloo_wait_as_long(launched, size, expected):
    set_for_user = prepare(
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    )
    assert set_for_user.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == expected


def test_over_gloo_the_watch_names_a_stopped_worker_before_gloo_gives_up(launched):
    set_for_user = prepare({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, stall_timeout=120)
    assert set_for_user["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "180"
