"""The coordinator of a check over ssh, with agents on this host."""

import socket

from hvdtrain.host.hostfile import HostSlots
from hvdtrain.tools.doctor.collect import CheckOptions
from hvdtrain.tools.doctor.coordinator import Coordinator, SshOptions, agent_script


def test_agents_on_this_host_report_and_a_silent_one_is_named(monkeypatch):
    monkeypatch.setattr("hvdtrain.tools.doctor.coordinator._LOGIN_SECONDS", 0.0)
    monkeypatch.setattr("hvdtrain.tools.doctor.coordinator.is_this_host", lambda _: True)
    scripts = iter([agent_script(), "sleep 600", "exit 7"])
    monkeypatch.setattr("hvdtrain.tools.doctor.coordinator.agent_script", lambda: next(scripts))
    hosts = [HostSlots(name, 1) for name in ("a", "b", "c")]
    coordinator = Coordinator(hosts, CheckOptions((), "runs", speed=False, timeout_seconds=5.0), SshOptions())
    coordinator.run()
    assert coordinator.answers["host info"][0]["hostname"] == socket.gethostname()
    assert coordinator.answers["host info"][1:] == [None, None]
    assert "did not answer in time" in coordinator.problems[1].found
    assert "exit code 7" in coordinator.problems[2].found
    assert 0 not in coordinator.problems
