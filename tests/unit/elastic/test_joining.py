"""How a job joins the elastic job that started it, and what its watch and its interface are then."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from support.elastic_driver import ScriptedDriver, disconnect, world

from hvdtrain.config import Config
from hvdtrain.elastic.member import membership as clients
from hvdtrain.elastic.member.membership import interface_for
from hvdtrain.elastic.watch.liveness import Told, Watching
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs.elastic.job import join_elastic_job
from hvdtrain.jobs.failures import Signals
from hvdtrain.jobs.opening import start
from hvdtrain.jobs.opening.start import JobSpec, started
from hvdtrain.workers.world import MemberInfo

CONFIG = Config(framework="torch", epochs=1)
JOB = JobSpec(CONFIG, None, "build", {})


def test_a_worker_joins_the_job_that_started_it(monkeypatch):
    signals = Signals()
    with ScriptedDriver() as driver, ThreadPoolExecutor(1) as pool:
        for name, value in driver.environ.items():
            monkeypatch.setenv(name, value)
        accepted = pool.submit(driver.accept)
        membership = join_elastic_job(CONFIG, signals, Watching())
        accepted.result(10)
        assert signals.membership is membership
        assert membership.worker == "w7"
        disconnect(membership)
    clients._current.clear()


@pytest.fixture
def backend(monkeypatch):
    backend = Mock(workers=None)
    monkeypatch.setattr(start, "load_backend", lambda *_: backend)
    monkeypatch.setattr(start, "watch_workers", pytest.fail)
    return backend


def _raise_in(member, error, watching=None):
    with started(JOB, Signals(), watching, member) as found:
        assert watching is None or watching.explain() == member.explain()
        assert (found.close.call_count, member.failed.call_count) == (0, 0)
        raise error


def test_the_driver_watches_the_workers_and_is_told_of_an_error_before_horovod_is_stopped(backend):
    member, error = Mock(explain=lambda: Told("rank 1 on h2: killed (SIGKILL)")), DataError("no data")
    with pytest.raises(DataError):
        _raise_in(member, error, Watching())
    member.failed.assert_called_once_with(error)
    backend.close.assert_called_once_with()


def test_a_job_that_cannot_be_elastic_is_refused(backend, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "127.0.0.1:4000")
    with pytest.raises(UsageError, match="fixed number of workers"):
        _raise_in(None, AssertionError("it began"))


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"10.0.0.9": "10.0.0.1"}, "eth0"),
        ({"10.0.0.9": "127.0.0.1", "h2": "10.1.0.1"}, "eth1"),  # the rendezvous is on this host
        ({"10.0.0.9": "127.0.0.1", "h2": ""}, "eth0"),
    ],
)
def test_several_hosts_connect_over_the_interface_between_them(monkeypatch, routes, expected):
    found = {"lo": ["127.0.0.1/8"], "eth0": ["10.0.0.1/24"], "eth1": ["10.1.0.1/24"]}
    monkeypatch.setattr(clients, "interfaces", lambda loopback: found)
    monkeypatch.setattr(clients, "own_addresses", lambda: {"eth0": [], "eth1": []})
    monkeypatch.setattr(clients, "address_towards", routes.__getitem__)
    members = tuple(MemberInfo(worker=f"w{n}", rank=n, host=f"h{n + 1}", pid=1) for n in range(2))
    one = world(one_host=False, store=("10.0.0.9", 1), members=members)
    assert interface_for(one) == expected
