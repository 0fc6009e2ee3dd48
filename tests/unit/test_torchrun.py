"""What Horovod is told of workers that torchrun started."""

import socket

import pytest

from hvdtrain.backends import torchrun
from hvdtrain.errors import EnvironmentFault

pytest.importorskip("horovod.runner")

ONE_HOST = {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TWO_HOSTS = {**ONE_HOST, "GROUP_WORLD_SIZE": "2"}


def info(group: int, local_size: int, host: str = "", **more: object) -> dict:
    return {"group": group, "local_size": local_size, "host": host or f"h{group}", **more}


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch):
    found = {"lo": ["127.0.0.1/8"], "eth0": ["192.0.2.7/24"]}
    monkeypatch.setattr(torchrun, "interfaces", lambda loopback: found)


def test_hosts_may_have_different_numbers_of_workers():
    plan = torchrun._allocate([info(0, 1), info(1, 2), info(1, 2)])
    values = [torchrun._variables(slot, {"address": "192.0.2.7", "port": 5}, "eth0") for slot in plan]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[int(value[f"HOROVOD_{name}"]) for name in names] for value in values] == [
        [0, 3, 0, 1, 0, 2],
        [1, 3, 0, 2, 1, 2],
        [2, 3, 1, 2, 0, 1],
    ]
    assert {value["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for value in values} == {"192.0.2.7"}
    assert {value["HOROVOD_CONTROLLER"] for value in values} == {"gloo"}


def test_two_groups_on_one_host_do_not_share_local_ranks():
    plan = torchrun._allocate([info(0, 1, "h"), info(1, 1, "h")])
    assert len({slot.hostname for slot in plan}) == 2


def test_ranks_that_are_not_in_the_order_of_hosts_are_refused():
    with pytest.raises(EnvironmentFault, match="host by host"):
        torchrun._allocate([info(0, 2), info(1, 1), info(0, 2)])


def test_one_host_uses_loopback():
    assert torchrun._own_interface(ONE_HOST) == ("lo", "127.0.0.1")


def test_several_hosts_use_the_route_to_the_store(monkeypatch):
    class Probe(socket.socket):
        def connect(self, target):
            assert target == ("localhost", 1)

        def getsockname(self):
            return "192.0.2.7", 5

    monkeypatch.setattr(torchrun.socket, "socket", Probe)
    assert torchrun._own_interface(TWO_HOSTS) == ("eth0", "192.0.2.7")


@pytest.mark.parametrize("environ", [ONE_HOST, TWO_HOSTS])
def test_the_user_may_choose_the_interface(environ):
    assert torchrun._own_interface({**environ, "HOROVOD_GLOO_IFACE": "eth0"}) == ("eth0", "192.0.2.7")
    with pytest.raises(EnvironmentFault, match="no network interface eth9"):
        torchrun._own_interface({**environ, "HOROVOD_GLOO_IFACE": "eth9"})


def test_a_loopback_address_does_for_one_host_only():
    first = info(0, 1, "h0", address="127.0.1.1")
    torchrun._check_address([first, info(1, 1, "h0")], TWO_HOSTS)
    with pytest.raises(EnvironmentFault, match="which h1 cannot reach"):
        torchrun._check_address([first, info(1, 1, "h1")], TWO_HOSTS)


def test_the_rendezvous_listens_on_the_address_of_the_job_only():
    server = torchrun._start_server("127.0.0.1", "k" * 64)
    try:
        assert server.server_address[0] == "127.0.0.1"
        torchrun._check_connection(info(0, 1, address="127.0.0.1", port=server.server_address[1]))
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(EnvironmentFault, match="cannot connect to rank 0 on h0"):
        torchrun._check_connection(info(0, 1, address="127.0.0.1", port=server.server_address[1]))


def test_a_store_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torchrun, "_EXCHANGE", "raise RuntimeError('no store')")
    with pytest.raises(EnvironmentFault, match="store at localhost:1: RuntimeError: no store"):
        torchrun._exchange({}, {**TWO_HOSTS, "RANK": "1", "WORLD_SIZE": "2"})
