"""Host files and -H lists, and the network interfaces and addresses of this host."""

import socket
from types import SimpleNamespace

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.host import hostfile as network
from hvdtrain.host.hostfile import HostSlots, parse_host_list, reachable_by_others, read_host_file


def test_a_host_file_is_read(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# a cluster\n\nhost1 slots=2  # the head\n10.0.0.2 slots = 1\n")
    assert read_host_file(path) == [HostSlots("host1", 2), HostSlots("10.0.0.2", 1)]
    assert parse_host_list("host1:2, 10.0.0.2:1") == read_host_file(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1 slots=2\nh2\n", "line 2: 'h2' is not a host"),
        ("h1 slots=two\n", "line 1: h1 has 'two' slots"),
        ("h1;reboot slots=1\n", "'h1;reboot' is not the name"),
        ("h1 slots=1\nh1 slots=2\n", "names h1 twice"),
        ("# none\n", "names no host"),
    ],
)
def test_a_wrong_host_file_is_refused_with_its_line(text, said, tmp_path):
    (tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_host_file(tmp_path / "hosts.txt")


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"HOROVOD_GLOO_IFACE": "eth1", "NCCL_SOCKET_IFNAME": "eth0"}, ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "eth0,eth1"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, []),
    ],
)
def test_interfaces_that_were_chosen_for_the_job(environ, names):
    assert network.chosen_interfaces(environ) == names


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
    assert network.own_addresses() == {"eth0": ["10.1.2.3/24"]}


def test_the_network_that_all_hosts_are_in_is_taken():
    own = {"eth0": ["10.0.0.1/24"], "docker0": ["172.17.0.1/16"]}
    others = [{"eth1": ["10.0.0.2/24"], "docker0": ["172.17.0.1/16"]}, {"eth0": ["10.0.0.3/24"]}]
    assert reachable_by_others(own, others) == ["10.0.0.1"]
    # all, where hosts are in different networks
    assert reachable_by_others({"eth0": ["10.0.0.1/24"]}, [{"eth0": ["10.0.9.2/24"]}]) == ["10.0.0.1"]
