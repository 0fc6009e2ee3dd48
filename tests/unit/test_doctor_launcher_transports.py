"""The transport over the store of horovodrun: lost agents, a launcher that ends or cannot be reached."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from horovod.runner.http.http_server import KVStoreServer

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools.doctor.launcher_transports import RendezvousTransport


@pytest.fixture
def store(monkeypatch):
    """The store that horovodrun keeps for Gloo."""
    server = KVStoreServer(verbose=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.start_server()))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield server
    server.shutdown_server()


def test_an_agent_that_never_reports_is_not_waited_for_twice(store):
    agents = [RendezvousTransport(index, 3) for index in range(3)]
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda one: one.allgather("info", one.index, 5.0), agents[:2]))
        start = time.monotonic()
        second = list(pool.map(lambda one: one.allgather("links", "x", 300.0), agents[:2]))
    assert first == [[0, 1, None]] * 2
    assert second == [["x", "x", None]] * 2
    assert time.monotonic() - start < 100
    assert agents[0].has_lost_agents


def test_rank_0_stops_waiting_when_the_launcher_ends_the_job(store):
    agent = RendezvousTransport(0, 2)
    agent.stop_waiting.set()
    assert agent.allgather("info", "mine", 600.0) == ["mine", None]


def test_a_launcher_that_cannot_be_reached_is_named(store):
    agent = RendezvousTransport(1, 2)
    store.shutdown_server()
    with pytest.raises(EnvironmentFault, match=r"horovodrun cannot be reached at 127\.0\.0\.1"):
        agent.allgather("info", "mine", 1.0)
    store.start_server()
