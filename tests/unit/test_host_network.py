"""The network interfaces and addresses of this host."""

import socket
from types import SimpleNamespace

import pytest

from hvdtrain.host import hostfile as network
from hvdtrain.host.hostfile import chosen_interfaces, own_addresses, reachable_by_others


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"HOROVOD_GLOO_IFACE": "eth1", "NCCL_SOCKET_IFNAME": "eth0"}, ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "eth0,eth1"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, []),
        ({"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"}, []),
    ],
)
def test_interfaces_that_were_chosen_for_the_job(environ, names):
    assert chosen_interfaces(environ) == names


def test_no_loopback_among_this_hosts_addresses(monkeypatch):
    address = lambda text, mask: SimpleNamespace(family=socket.AF_INET, address=text, netmask=mask)  # noqa: E731
    found = {
        "lo": [address("127.0.0.1", "255.0.0.0")],
        "eth0": [address("10.1.2.3", "255.255.255.0")],
        "down": [address("10.9.9.9", "255.255.255.0")],
    }
    states = {name: SimpleNamespace(isup=name != "down") for name in found}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: states)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert own_addresses() == {"eth0": ["10.1.2.3/24"]}


def test_the_network_that_all_hosts_are_in_is_taken():
    own = {"eth0": ["10.0.0.1/24"], "docker0": ["172.17.0.1/16"]}
    others = [{"eth1": ["10.0.0.2/24"], "docker0": ["172.17.0.1/16"]}, {"eth0": ["10.0.0.3/24"]}]
    assert reachable_by_others(own, others) == ["10.0.0.1"]


def test_where_hosts_are_in_different_networks_all_addresses_are_tried():
    assert reachable_by_others({"eth0": ["10.0.0.1/24"]}, [{"eth0": ["10.0.9.2/24"]}]) == ["10.0.0.1"]
