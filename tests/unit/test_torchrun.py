"""What Horovod is told of workers that torchrun started."""

import pytest

from hvdtrain.backends import torchrun
from hvdtrain.errors import EnvironmentFault

pytest.importorskip("horovod.runner")


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
