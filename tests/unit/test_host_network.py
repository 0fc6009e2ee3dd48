"""What would crash native libraries on a host, and this host's addresses."""

import socket
from types import SimpleNamespace

import pytest

from hvdtrain import hostcheck
from hvdtrain.addresses import chosen_interfaces, own_addresses, reachable_by_others
from hvdtrain.errors import EnvironmentFault
from hvdtrain.hostcheck import check_host

GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_IFACE": "lo"}


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")


def test_a_name_that_does_not_resolve_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(hostcheck.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(
        EnvironmentFault, match=r"host no-such-host.invalid cannot resolve its own name"
    ) as error:
        check_host(GLOO)
    assert "/etc/hosts" in error.value.remedy


def test_mpi_needs_no_name(monkeypatch):
    monkeypatch.setattr(hostcheck.socket, "gethostname", lambda: "no-such-host.invalid")
    check_host({})


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(EnvironmentFault, match="has no network interface eth77"):
        check_host({"NCCL_SOCKET_IFNAME": "eth77"})


def test_one_of_several_interfaces_is_enough():
    check_host({"NCCL_SOCKET_IFNAME": "eth77,lo"})


def test_without_a_launcher_no_interface_is_checked(monkeypatch):
    monkeypatch.setattr(hostcheck, "launched_rank", lambda: None)
    check_host({"NCCL_SOCKET_IFNAME": "eth77"})


def test_without_a_launcher_gloo_needs_the_name_as_well(monkeypatch):
    monkeypatch.setattr(hostcheck, "launched_rank", lambda: None)
    monkeypatch.setattr(hostcheck.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(EnvironmentFault, match=r"host no-such-host.invalid cannot resolve its own name"):
        check_host({})


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
def test_interfaces_that_were_chosen(environ, names):
    assert chosen_interfaces(environ) == names


def test_no_loopback_among_this_hosts_addresses(monkeypatch):
    from hvdtrain import addresses

    address = lambda text, mask: SimpleNamespace(family=socket.AF_INET, address=text, netmask=mask)  # noqa: E731
    found = {
        "lo": [address("127.0.0.1", "255.0.0.0")],
        "eth0": [address("10.1.2.3", "255.255.255.0")],
        "down": [address("10.9.9.9", "255.255.255.0")],
    }
    states = {name: SimpleNamespace(isup=name != "down") for name in found}
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(addresses.psutil, "net_if_stats", lambda: states)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert own_addresses() == {"eth0": ["10.1.2.3/24"]}


def test_the_network_that_all_hosts_are_in_is_taken():
    own = {"eth0": ["10.0.0.1/24"], "docker0": ["172.17.0.1/16"]}
    others = [{"eth1": ["10.0.0.2/24"], "docker0": ["172.17.0.1/16"]}, {"eth0": ["10.0.0.3/24"]}]
    assert reachable_by_others(own, others) == ["10.0.0.1"]


def test_where_hosts_are_in_different_networks_all_addresses_are_tried():
    assert reachable_by_others({"eth0": ["10.0.0.1/24"]}, [{"eth0": ["10.0.9.2/24"]}]) == ["10.0.0.1"]
