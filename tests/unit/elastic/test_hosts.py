"""The hosts of an elastic job: what a list or a script may say, and what happens if a script fails."""

import time

import psutil
import pytest

from hvdtrain.elastic.driver.hosts import HostWatch, ScriptHosts, parse_hosts
from hvdtrain.errors import DiscoveryError
from hvdtrain.host.hostfile import HostSlots


@pytest.mark.parametrize(
    ("line", "host", "slots"),
    [
        ("h1:2", "h1", 2),
        ("h1", "h1", 4),
        ("  h1:2  # the first one", "h1", 2),
        ("h1 slots = 2", "h1", 2),
        ("w-0.job.ns.svc", "w-0.job.ns.svc", 4),
        ("fe80::1", "fe80::1", 4),
        ("[fe80::1]:2", "fe80::1", 2),
    ],
)
def test_a_line_is_a_host(line, host, slots):
    assert parse_hosts(f"# hosts\n\n{line}\n", 4) == [HostSlots(host, slots)]


def test_a_host_without_slots_is_left_out():
    assert parse_hosts("h1:0\nh2:1") == [("h2", 1)]


def script(tmp_path, text, name="hosts.sh"):
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_names_hosts(tmp_path):
    hosts = ScriptHosts(script(tmp_path, "echo h2:2; echo h1; echo h1"), 3)
    assert hosts.find() == hosts.find() == [("h2", 2), ("h1", 3)]


def test_a_script_that_names_no_host_yet_is_no_error(tmp_path):
    assert ScriptHosts(script(tmp_path, "true")).find() == []


def running():
    """Return the processes below this one."""
    return {one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo not there >&2; exit 3", "exit code 3; it said: not there"),
        ("echo h1:x", "line 1, 'h1:x'"),
        ("yes h1:1", "more than 1 MiB"),
        ("echo waits >&2; sleep 300", "did not end within 2 s; it said: waits"),
        ("trap '' TERM; exec >&- 2>&-; sleep 300", "did not end within 2 s"),
    ],
)
def test_a_script_that_fails_is_named_and_leaves_nothing_behind(tmp_path, text, words):
    hosts = ScriptHosts(script(tmp_path, text), run_seconds=2 if "did not end" in words else 60)
    before = running()
    since = time.monotonic()
    with pytest.raises(DiscoveryError) as failed:
        hosts.find()
    assert hosts.script in failed.value.problem
    assert words in failed.value.problem
    assert time.monotonic() - since < 120
    assert running() <= before


class Answers:
    """A discovery whose answers are given."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def find(self):
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            raise DiscoveryError(answer)
        return answer


def test_the_last_good_answer_stays_and_a_new_error_is_said_once():
    one, two = [HostSlots("h1", 2)], [HostSlots("h1", 2), HostSlots("h2", 2)]
    said = []
    watch = HostWatch(
        Answers(one, "no network", "no network", "other", two, [], "no network"), said.append, 600
    )
    watch.start()
    seen = []
    for _ in range(6):
        watch.look()
        seen.append(watch.hosts())
    watch.close()
    assert seen == [one, one, one, two, two, two]
    assert [text.split("\n")[0] for text in said] == [
        "no network",
        "other",
        "host discovery works again: 4 slots",
        "the host discovery script no longer names a host",
        "no network",
    ]
    assert "remain" in said[0]


def test_a_script_that_never_succeeded_is_an_error(tmp_path):
    watch = HostWatch(ScriptHosts(script(tmp_path, "exit 1")), lambda text: None)
    with pytest.raises(DiscoveryError, match="exit code 1"):
        watch.start()
