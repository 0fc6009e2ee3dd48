"""How the doctor reaches hosts, and its checks, on reports of hosts with one value changed."""

import copy
import json
import socket
import subprocess
import sys
import time

import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.tools.doctor.checks import diagnose
from hvdtrain.tools.doctor.collect import CheckOptions, Listeners, collect_host_info, connect
from hvdtrain.tools.doctor.report import Host, Report
from hvdtrain.tools.doctor.ssh import Coordinator, SshOptions, agent_script
from hvdtrain.tools.doctor.transports import RendezvousTransport, _Rank0Transport

DISK = {"path": "runs", "free_mib": 50_000, "error": ""}
INFO = {
    "software": {
        "versions": {
            "Python": "3.11.7", "hvdtrain": "0.1.0, files 1234", "PyTorch": "2.13.0", "TensorFlow": "",
            "Keras": "", "NumPy": "2.4.6", "mpi4py": "4.1.2", "MPI": "Open MPI 5.0.11",
            "Horovod": "0.28.1 for torch 2.13.0; MPI (Open MPI 5.0.11), Gloo",
        },
        "python": "/env/bin/python", "build_key": "abc", "nccl_build": False, "horovod": {"torch": ""},
        "mpi": {"Horovod": "Open MPI 5.0.11", "mpi4py": "Open MPI v5.0.11", "mpi4py error": ""}, "gpus": {},
    },
    "hostname": "h", "addresses": ["10.0.0.1"], "own_addresses": ["10.0.0.1", "127.0.0.1"],
    "interfaces": {"eth0": ["10.0.0.1/24"]}, "directory": "/work",
    "disks": {"run directory": DISK, "temporary directory": DISK, "/dev/shm": DISK},
    "cores": 4, "gpus": {"cards": [], "error": ""},
}  # fmt: skip
CARDS = [{"name": "H200", "memory_mib": "143771", "driver": "570.1"}] * 2


def changed(**changes):
    """Return a host's info with values changed; ``a__b`` is the value ``b`` of the mapping ``a``."""
    info = copy.deepcopy(INFO)
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = info
        for key in path:
            inner = inner[key]
        inner[last] = value
    return info


def make_report(*infos, slots=1, answers=None):
    hosts = tuple(Host(f"h{number}", slots, info) for number, info in enumerate(infos, start=1))
    links = [
        {str(b): {"eth0": {"error": "", "clock": 0.0, "trip": 0.001}} for b in range(len(infos)) if b != a}
        for a in range(len(infos))
    ]
    return Report(hosts, tuple(range(len(infos))), {"links": links, **(answers or {})}, "/work")


def wrong(report: Report) -> list[tuple[str, str, str]]:
    return [(f.host, f.check, f.status) for f in diagnose(report, "ssh").findings if f.status != "ok"]


@pytest.mark.parametrize(
    ("changes", "check", "status"),
    [
        ({"software__versions__Python": "3.12.1"}, "Python", "fail"),
        ({"software__versions__hvdtrain": "0.1.0, files 99"}, "hvdtrain", "fail"),
        ({"software__python": "/other/python"}, "Python's path", "warn"),
        ({"software__mpi": {"Horovod": "Open MPI 4.1", "mpi4py": "", "mpi4py error": ""}}, "one MPI", "warn"),
        ({"addresses": ["10.9.9.9"]}, "own name", "fail"),
        ({"interfaces": {"ens3": ["10.0.0.2/24"]}}, "interface", "fail"),
        ({"disks__temporary directory": {**DISK, "free_mib": 1}}, "temporary directory", "fail"),
        ({"cores": 0}, "cores", "warn"),
    ],
)
def test_one_host_that_differs_is_named(changes, check, status):
    found = wrong(make_report(INFO, changed(**changes), INFO))
    assert ("h2", check, status) in found
    assert {host for host, *_ in found} == {"h2"}


GPUS = {"gpus": {"cards": CARDS, "error": ""}, "software__nccl_build": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("GPUs", "fail"), ("GPU driver", "warn")]),
        ({**GPUS, "software__nccl_build": False}, [("Horovod on GPUs", "fail")]),
        ({**GPUS, "software__gpus": {"torch": {"gpus": ["H200"]}}}, [("GPUs", "warn")]),
    ],
)
def test_a_host_whose_gpus_differ_is_named(changes, expected):
    good = changed(**GPUS)
    assert wrong(make_report(good, changed(**changes), good, slots=2)) == [("h2", *one) for one in expected]


def broken(*pairs: tuple[int, int], hosts: int):
    report = make_report(*[INFO] * hosts)
    for a, b in pairs:
        report.answers["links"][a][str(b)]["eth0"] = {"error": "no answer"}
    return wrong(report)


def test_the_host_that_nobody_reaches_is_named():
    assert broken((0, 1), (2, 1), hosts=3) == [("h2", "ports", "fail")]
    assert broken((0, 1), hosts=2) == [("h2", "ports", "fail")]
    assert broken((0, 2), (1, 2), (3, 2), hosts=4) == [("h3", "ports", "fail")]


def test_a_second_interface_that_leads_nowhere_is_no_fault():
    two = changed(interfaces={"eth0": ["10.0.0.1/24"], "ib0": ["10.1.0.1/24"]})
    report = make_report(two, two)
    for a, b in ((0, 1), (1, 0)):
        report.answers["links"][a][str(b)]["ib0"] = {"error": "no answer"}
    found = [f for f in diagnose(report, "ssh").findings if f.check in ("interface", "ports")]
    assert {f.status for f in found} == {"ok"}
    assert "--network-interfaces eth0" in found[0].found


@pytest.mark.parametrize(("offset", "status"), [(0.4, ""), (5.0, "warn"), (-7200.0, "warn"), (60.0, "fail")])
def test_a_clock_counts_beyond_what_the_round_trip_leaves_open(offset, status):
    report = make_report(INFO, INFO)
    report.answers["links"][0]["1"]["eth0"]["clock"] = offset
    report.answers["links"][1]["0"]["eth0"] = {"error": "no answer"}
    found = wrong(report)
    assert [one[2] for one in found if one[:2] == ("h2", "clock")] == ([status] if status else [])


def test_a_directory_that_is_not_shared_is_a_warning():
    answers = {"marker": ["/work/runs/.mark", None], "marker seen": [True, False]}
    assert wrong(make_report(INFO, INFO, answers=answers)) == [("h2", "run directory", "warn")]


def test_a_listener_answers_who_knows_the_token():
    listeners = Listeners({"lo": ["127.0.0.1/8"]})
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
    coordinator = Coordinator(hosts, CheckOptions((), "runs", timeout_seconds=10.0), SshOptions())
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
