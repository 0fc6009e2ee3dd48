"""doctor's parts: host lists, ssh's outcomes, listeners, agents, table and document."""

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from horovod.runner.http.http_server import KVStoreServer
from rich.console import Console
from test_doctor_checks import FACTS, case, changed

from hvdtrain.doctor import probes, speed
from hvdtrain.doctor.agents import Head
from hvdtrain.doctor.document import as_json
from hvdtrain.doctor.examination import Request
from hvdtrain.doctor.launched import RendezvousExchange
from hvdtrain.doctor.machine import machine_facts, parse_cards
from hvdtrain.doctor.ports import Listeners, connect, conversation
from hvdtrain.doctor.ssh import SshOptions, agent_script, why_not
from hvdtrain.doctor.table import show
from hvdtrain.doctor.verdicts import diagnose
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.hosts import HostSlots, parse_host_list, read_host_file


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
        ("h1 slots=0\n", "h1 has '0' slots"),
        ("h1;reboot slots=1\n", "'h1;reboot' is not the name"),
        ("h1 slots=1\nh1 slots=2\n", "names h1 twice"),
        ("# none\n", "names no host"),
    ],
)
def test_a_wrong_host_file_is_refused_with_its_line(text, said, tmp_path):
    (tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_host_file(tmp_path / "hosts.txt")


def test_a_host_file_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"cannot read the host file missing\.txt"):
        read_host_file(Path("missing.txt"))


@pytest.mark.parametrize(
    "text", ["h1", "h1:0", "h1:x", "h1:1,,h2:1", "h1:1,h1:1", "-oProxyCommand=x;y:1", "-V:1"]
)
def test_a_wrong_host_list_is_refused(text):
    with pytest.raises(UsageError):
        parse_host_list(text)


@pytest.mark.parametrize(
    ("stderr", "check", "found"),
    [
        ("ssh: Could not resolve hostname h2: Name or service not known", "name", "does not resolve"),
        ("h2: Permission denied (publickey).", "ssh", "refuses the ssh key"),
        ("connect to host h2 port 22: Connection refused", "ssh", "nothing listens"),
        ("connect to host h2 port 22: No route to host", "ssh", "no way to it"),
        ("connect to host h2 port 22: Connection timed out", "ssh", "does not answer"),
        ("No ED25519 host key is known\nHost key verification failed.", "ssh", "not known"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "ssh", "another than"),
        ("something new", "ssh", "something new"),
    ],
)
def test_outcomes_of_ssh_are_told_apart(stderr, check, found):
    finding = why_not("h2", 255, stderr, over_ssh=True)
    assert (finding.host, finding.check, finding.verdict) == ("h2", check, "fail")
    assert found in finding.found
    assert finding.remedy


def test_what_is_passed_on_over_ssh_holds_no_secret():
    script = agent_script({"PATH": "/a b", "AWS_SECRET_ACCESS_KEY": "hunter2", "PYTHONPATH": "/p"})
    assert "'/a b'" in script
    assert "hunter2" not in script
    words = SshOptions(port=2222).words("h2")
    assert words[-1] == "h2"
    assert "StrictHostKeyChecking" not in " ".join(words)


@pytest.fixture
def listeners():
    listeners = Listeners({"lo": ["127.0.0.1/8"]})
    yield listeners
    listeners.close()


def test_a_listener_answers_who_knows_the_token(listeners):
    address, port, token = listeners.places["lo"]
    good = connect([address, port, token])
    assert good["error"] == ""
    assert abs(good["clock"]) < 1
    assert connect([address, port, "0" * len(token)])["error"] == "the connection was closed"
    listeners.close()
    assert connect([address, port, token])["error"] == "connection refused"


def test_a_listener_is_bound_to_its_address_alone(listeners):
    _, port, token = listeners.places["lo"]
    assert connect(["127.0.0.2", port, token])["error"] == "connection refused"


def test_messages_of_all_sizes_are_timed(listeners):
    with conversation(listeners.places["lo"]) as talk:
        times = speed.message_times(talk.send)
    assert list(times) == [str(size) for size in speed.SIZES]
    assert speed.bytes_per_second(times, speed.MIB) > 1e6


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def send(message):
        clock[0] += len(message) / 1e6

    assert list(speed.message_times(send)) == [str(size) for size in speed.SIZES[:3]]


def test_bus_bandwidth_is_that_of_the_formula():
    assert speed.bus_bytes_per_second(1000, 4, 0.5) == 2 * 3 / 4 * 1000 / 0.5


def test_a_probe_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setitem(probes._CODE, "torch", "import os; os.abort()")
    assert probes.probe("torch", 30) == {"error": "loading it ended with SIGABRT"}
    monkeypatch.setitem(probes._CODE, "torch", "import time; time.sleep(60)")
    assert "longer than 1 s" in probes.probe("torch", 1)["error"]
    monkeypatch.setitem(probes._CODE, "torch", "import no_such_thing")
    assert probes.probe("torch", 30)["error"] == "ModuleNotFoundError: No module named 'no_such_thing'"


def test_cards_are_read():
    text = "0, NVIDIA H200, 143771, 570.86.15\n1, NVIDIA H200, 143771, 570.86.15\n"
    card = {"name": "NVIDIA H200", "memory_mib": "143771", "driver": "570.86.15"}
    assert parse_cards(text) == [card, card]


def test_facts_are_json_and_hold_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = json.dumps(machine_facts(tmp_path / "runs" / "deep"))
    assert "hunter2" not in text
    assert not (tmp_path / "runs").exists()


def test_agents_on_this_host_are_heard_and_a_silent_one_is_named(monkeypatch):
    monkeypatch.setattr("hvdtrain.doctor.agents._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("hvdtrain.doctor.agents.is_this_host", lambda _: True)
    scripts = iter([agent_script(), "sleep 600", "exit 7"])
    monkeypatch.setattr("hvdtrain.doctor.agents.agent_script", lambda: next(scripts))
    hosts = [HostSlots(name, 1) for name in ("a", "b", "c")]
    head = Head(hosts, Request((), "runs", speed=False, seconds=5.0), SshOptions())
    head.run()
    assert head.record["facts"][0]["hostname"] == socket.gethostname()
    assert head.record["facts"][1:] == [None, None]
    assert "did not answer in time" in head.problems[1].found
    assert "exit code 7" in head.problems[2].found
    assert 0 not in head.problems


@pytest.fixture
def store(monkeypatch):
    """The store that horovodrun keeps for Gloo."""
    server = KVStoreServer(verbose=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.start_server()))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield server
    server.shutdown_server()


def test_a_member_that_never_reports_is_not_waited_for_twice(store):
    members = [RendezvousExchange(index, 3) for index in range(3)]
    with ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda one: one.share("facts", one.index, 1.5), members[:2]))
        start = time.monotonic()
        second = list(pool.map(lambda one: one.share("links", "x", 30.0), members[:2]))
    assert first == [[0, 1, None]] * 2
    assert second == [["x", "x", None]] * 2
    assert time.monotonic() - start < 10
    assert members[0].has_lost


def test_rank_0_shows_what_it_has_when_the_launcher_ends_the_job(store):
    member = RendezvousExchange(0, 2)
    member.hurry.set()
    assert member.share("facts", "mine", 600.0) == ["mine", None]


def test_a_launcher_that_cannot_be_reached_is_named(store):
    member = RendezvousExchange(1, 2)
    store.shutdown_server()
    with pytest.raises(EnvironmentFault, match=r"horovodrun cannot be reached at 127\.0\.0\.1"):
        member.share("facts", "mine", 1.0)
    store.start_server()


def shown(*facts, width=100, **more) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(diagnose(case(*facts, **more), "ssh"), console)
        return console.export_text()


@pytest.mark.parametrize("hosts", [1, 2, 4, 5, 16, 17, 200])
def test_the_table_fits_80_columns(hosts):
    text = shown(*[FACTS] * hosts, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("2.13.0") == 2  # equal values are shown once: of PyTorch, and of Horovod
    assert f"{hosts} host" in text


def test_a_trouble_of_several_hosts_is_told_once_with_its_remedy():
    bad = changed(software__versions__PyTorch="2.12.0")
    text = shown(FACTS, bad, bad, FACTS, FACTS)
    assert text.count("FAIL") == 1
    assert "FAIL  h2, h3: PyTorch: 2.12.0; 2.13.0 on h1, h4, h5" in text
    assert "Install the same version" in text
    assert "a job would fail because of h2, h3" in text


def test_the_document_holds_all():
    diagnosis = diagnose(case(FACTS, changed(cores=0)), "ssh")
    document = json.loads(as_json(diagnosis))
    assert document["format"] == 1
    assert document["exit_code"] == 0
    assert [host["name"] for host in document["hosts"]] == ["h1", "h2"]
    assert {"host": "h2", "check": "cores", "verdict": "warn"}.items() <= next(
        f for f in document["findings"] if f["verdict"] == "warn"
    ).items()


def test_the_command_examines_this_host_without_a_framework_loaded_here(tmp_path):
    words = [sys.executable, "-m", "hvdtrain", "doctor", "--quick", "--json", "--framework", "torch"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"], done.stderr
    assert document["how"] == "this host alone"
    assert list(tmp_path.iterdir()) == []
