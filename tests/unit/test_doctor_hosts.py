"""How the doctor reaches hosts: listeners, the launcher's store, ssh, discovery scripts."""

import json
import socket
import subprocess
import sys
import time

import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.tools.doctor.collect import CheckOptions, Listeners, collect_host_info, connect
from hvdtrain.tools.doctor.ssh import Coordinator, SshOptions, agent_script
from hvdtrain.tools.doctor.transports import RendezvousTransport, _Rank0Transport


@pytest.fixture
def listeners():
    listeners = Listeners({"lo": ["127.0.0.1/8"]})
    yield listeners
    listeners.close()


def test_a_listener_answers_who_knows_the_token(listeners):
    address, port, token = listeners.endpoints["lo"]
    good = connect([address, port, token])
    assert good["error"] == ""
    assert abs(good["clock"]) < 20
    assert connect([address, port, "0" * len(token)])["error"] == "the connection was closed"
    listeners.close()
    assert connect([address, port, token])["error"] == "connection refused"


def test_what_a_host_reports_is_json_and_holds_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    options = CheckOptions((), str(tmp_path / "runs" / "deep"), timeout_seconds=60.0)
    text = json.dumps(collect_host_info(options, "h", 1))
    assert "hunter2" not in text
    assert not (tmp_path / "runs").exists()


def test_a_launcher_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "9")
    with pytest.raises(EnvironmentFault, match=r"horovodrun cannot be reached at 127\.0\.0\.1"):
        RendezvousTransport(1, 2).allgather("info", "mine", 1.0)


class OneAnswers(_Rank0Transport):
    """Agent 1 answers at once, and agent 2 never."""

    def _send(self, text, agents):
        self.sent = json.loads(text), agents

    def _received(self, agent):
        return '"y"' if agent == 1 else None


def test_an_agent_that_never_reports_is_not_waited_for_twice():
    rank_0, begun = OneAnswers(0, 3), time.monotonic()
    assert [rank_0.allgather("info", "x", limit) for limit in (0.1, 30.0)] == [["x", "y", None]] * 2
    assert time.monotonic() - begun < 20
    assert (rank_0.sent, rank_0.is_stuck) == ((["x", "y", None], [1]), True)


def test_what_is_passed_on_over_ssh_holds_no_secret():
    script = agent_script({"PATH": "/a b", "AWS_SECRET_ACCESS_KEY": "hunter2", "PYTHONPATH": "/p"})
    assert "'/a b'" in script
    assert "hunter2" not in script
    command = SshOptions(port=2222).command("h2")
    assert command[-1] == "h2"
    assert "StrictHostKeyChecking" not in " ".join(command)


def test_agents_on_this_host_report_and_a_silent_one_is_named(monkeypatch):
    monkeypatch.setattr("hvdtrain.tools.doctor.ssh._LOGIN_SECONDS", 0.0)
    monkeypatch.setattr("hvdtrain.tools.doctor.ssh.is_this_host", lambda _: True)
    scripts = iter([agent_script(), "sleep 600", "exit 7"])
    monkeypatch.setattr("hvdtrain.tools.doctor.ssh.agent_script", lambda: next(scripts))
    hosts = [HostSlots(name, 1) for name in ("a", "b", "c")]
    coordinator = Coordinator(hosts, CheckOptions((), "runs", timeout_seconds=3.0), SshOptions())
    coordinator.run()
    assert coordinator.answers["host info"][0]["hostname"] == socket.gethostname()
    assert coordinator.answers["host info"][1:] == [None, None]
    assert "did not answer in time" in coordinator.problems[1].found
    assert "exit code 7" in coordinator.problems[2].found
    assert 0 not in coordinator.problems


def test_the_command_checks_the_hosts_that_the_script_prints(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "doctor", "--json", "--framework", "torch",
         "--run-dir", str(tmp_path), "--host-discovery-script", "echo localhost"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert [(host["name"], host["slots"]) for host in document["hosts"]] == [("localhost", 1)]
