"""What would crash native libraries on a host."""

import pytest

from hvdtrain.elastic.member.orders import blame_for
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host import environment as preflight
from hvdtrain.host.environment import check_host

GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_IFACE": "lo"}


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")


def test_a_name_that_does_not_resolve_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(
        EnvironmentFault, match=r"host no-such-host.invalid cannot resolve its own name"
    ) as error:
        check_host(GLOO)
    assert "/etc/hosts" in error.value.remedy


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(EnvironmentFault, match="has no network interface eth77"):
        check_host({"NCCL_SOCKET_IFNAME": "eth77"})


def test_a_worker_of_an_elastic_job_needs_the_interface_although_it_starts_alone(monkeypatch):
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    with pytest.raises(EnvironmentFault, match="no network interface nothere0"):
        check_host({"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_GLOO_IFACE": "nothere0"})


@pytest.mark.parametrize("seconds", ["abc", "0", "-1", "1.5"])
def test_a_time_limit_that_horovod_takes_as_none_ends_an_elastic_job_at_once(seconds):
    environ = {"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds}
    with pytest.raises(EnvironmentFault, match="HOROVOD_GLOO_TIMEOUT_SECONDS must be a whole number") as seen:
        check_host(environ)
    assert blame_for(seen.value) == "code"  # and no other worker tries it
