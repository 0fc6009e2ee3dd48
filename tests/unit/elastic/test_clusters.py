"""What a driver asks of a cluster: addresses, stores, processes and their ends."""

import queue
import sys

import pytest

pytest.importorskip("horovod.runner.gloo_run", reason="Horovod is not installed")

from hvdtrain.elastic.driver import clusters
from hvdtrain.elastic.driver.clusters import HostCluster, StartOptions
from hvdtrain.elastic.driver.records import Slot
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots

KEY = "k" * 64
HERE = [HostSlots("localhost", 2)]
SECONDS = 120


def cluster(hosts=HERE, code="pass", **options):
    return HostCluster(StartOptions([sys.executable, "-c", code]), KEY, lambda: hosts, **options)


@pytest.fixture
def networks(monkeypatch):
    """Two networks, and a host in each that is not this one."""
    routes = {"h1": "10.1.0.1", "h2": "10.2.0.1", "localhost": "127.0.0.1"}
    found = {"eth0": ["10.1.0.1/24"], "eth1": ["10.2.0.1/24"], "docker0": ["172.17.0.1/16"]}
    monkeypatch.setattr(clusters, "address_towards", lambda host: routes.get(host, ""))
    monkeypatch.setattr(clusters, "own_addresses", lambda: found)
    monkeypatch.setattr(clusters, "interfaces", lambda loopback: {**found, "lo": ["127.0.0.1/8"]})
    monkeypatch.setattr(clusters, "is_this_host", lambda host: host == "localhost")


def test_a_job_on_this_host_alone_listens_to_nobody_else():
    one = cluster()
    assert one.listen_on == ["127.0.0.1"]
    assert one.address_for("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    ("hosts", "is_fixed", "addresses"),
    [
        (["localhost"], True, ["127.0.0.1"]),
        (["localhost"], False, ["10.1.0.1", "10.2.0.1", "172.17.0.1"]),  # another host may come
        (["localhost", "h2"], True, ["10.2.0.1"]),
        (["h1", "h2"], False, ["10.1.0.1", "10.2.0.1"]),
        (["unknown"], True, ["10.1.0.1", "10.2.0.1", "172.17.0.1"]),
    ],
)
def test_a_job_listens_on_the_way_to_its_hosts(networks, hosts, is_fixed, addresses):
    assert cluster([HostSlots(host, 1) for host in hosts], is_fixed=is_fixed).listen_on == addresses


def test_each_host_is_given_the_address_that_it_reaches(networks):
    one = cluster([HostSlots("h1", 1), HostSlots("h2", 1)])
    for host in ("h1", "h2", "localhost"):
        one.find_way_to(host)
    assert [one.address_for(host) for host in ("h1", "h2", "localhost", "h9")] == [
        "10.1.0.1", "10.2.0.1", "10.1.0.1", "10.1.0.1",
    ]  # fmt: skip


def test_the_users_interfaces_count(networks):
    assert cluster(interface_names=["eth1"]).listen_on == ["10.2.0.1"]
    with pytest.raises(UsageError, match=r"no eth7 .*\n.*docker0, eth0, eth1, lo"):
        cluster(interface_names=["eth7"])


def test_a_worker_is_started_where_the_driver_listens_and_its_end_reported():
    ends = queue.Queue()
    one = cluster(code="import os, sys; sys.exit(os.environ['HVDTRAIN_ELASTIC'] == '127.0.0.1:7')")
    one.addresses = [("127.0.0.1", 7)]
    one.start("w1", Slot("localhost", 0), ends.put)
    assert ends.get(timeout=SECONDS) == 1
