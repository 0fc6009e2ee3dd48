"""The variables that are set for Open MPI and Horovod, threads, and what would crash native libraries."""

import os
from types import SimpleNamespace

import pytest

from hvdtrain.elastic.member.orders import blame_for
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host import cores, environment
from hvdtrain.host.environment import check_host, prepare

GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_IFACE": "lo"}


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
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    assert environ == {**gloo, "UCX_DEBUG_SIGNO": "0"}  # SIGHUP is hvdtrain's


def test_horovod_does_not_end_long_work_that_the_watch_knows_of(launched):
    assert prepare({}, stall_timeout=120) == {"HOROVOD_FUSION_THRESHOLD": "0"}


@pytest.mark.parametrize(("shutdown", "check"), [("30", "15"), ("1", "1"), ("61", None)])
def test_a_stall_limit_of_the_user_below_a_minute_acts(launched, shutdown, check):
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": shutdown}
    assert prepare(environ).get("HOROVOD_STALL_CHECK_TIME_SECONDS") == check
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == shutdown


@pytest.mark.parametrize(
    ("environ", "yields", "nanoseconds"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, True, "200000"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "2"}, True, None),
    ],
)
def test_open_mpi_yields_if_threads_outnumber_cores_and_sleeps_if_workers_do(
    launched, environ, yields, nanoseconds
):
    set_for_user = prepare(environ)
    assert (set_for_user.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    strategy = set_for_user.get("OMPI_MCA_threads_pthreads_yield_strategy")
    assert strategy == ("nanosleep" if nanoseconds else None)
    assert set_for_user.get("OMPI_MCA_threads_pthreads_nanosleep_time") == nanoseconds


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


@pytest.mark.parametrize(
    ("environ", "stall_timeout", "seconds"),
    [
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, None, "60"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, 120, "180"),  # the watch names a stopped worker before
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, None, "60"),  # data go over Gloo
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None, None),  # within the host
    ],
)
def test_over_gloo_workers_wait_longer_for_others(launched, environ, stall_timeout, seconds):
    set_for_user = prepare({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, stall_timeout)
    assert set_for_user.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds


def test_a_name_that_does_not_resolve_is_named_with_the_remedy(monkeypatch, launched):
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(EnvironmentFault, match=r"host no-such-host.invalid cannot resolve its own name"):
        check_host(GLOO)


def test_a_worker_of_an_elastic_job_needs_the_interface_although_it_starts_alone():
    with pytest.raises(EnvironmentFault, match="no network interface nothere0"):
        check_host({"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_GLOO_IFACE": "nothere0"})


@pytest.mark.parametrize("seconds", ["abc", "0"])
def test_a_time_limit_that_horovod_takes_as_none_ends_an_elastic_job_at_once(launched, seconds):
    environ = {"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds}
    with pytest.raises(EnvironmentFault, match="HOROVOD_GLOO_TIMEOUT_SECONDS must be a whole number") as seen:
        check_host(environ)
    assert blame_for(seen.value) == "code"  # and no other worker tries it


@pytest.mark.parametrize(
    ("own", "launcher", "local_size", "expected"),
    [
        (16, 16, 5, 3),
        (2, 2, 4, 1),  # more workers than cores
        (1, 16, 4, 1),  # bound to a core
        (4, 16, 2, 4),  # bound to less than the share
    ],
)
def test_a_worker_gets_its_share_of_the_cores(monkeypatch, own, launcher, local_size, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own)))
    parent = SimpleNamespace(cpu_affinity=lambda: list(range(launcher)))
    monkeypatch.setattr(cores.psutil, "Process", lambda pid: parent)
    assert cores.threads_per_worker(local_size) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which takes precedence
    assert cores.threads_per_worker(local_size) == 3
