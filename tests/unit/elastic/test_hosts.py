"""Hosts and limits of an elastic job: what a list or a script may say, if a script fails, and numbers."""

import re
import time
from unittest.mock import Mock

import psutil
import pytest

from hvdtrain.elastic.driver.hosts import HostWatch, ScriptHosts, parse_hosts
from hvdtrain.elastic.driver.records import Limits, make_limits
from hvdtrain.errors import DiscoveryError, UsageError
from hvdtrain.host.hostfile import HostSlots


@pytest.mark.parametrize(
    ("line", "host", "slots"),
    [
        ("h1:2", "h1", 2),
        ("h1", "h1", 4),
        ("  h1:2  # the first one", "h1", 2),
        ("h1 slots = 2\nh2:0", "h1", 2),
        ("fe80::1", "fe80::1", 4),
        ("[fe80::1]:2", "fe80::1", 2),
    ],
)
def test_a_line_is_a_host(line, host, slots):
    assert parse_hosts(f"# hosts\n\n{line}\n", 4) == [HostSlots(host, slots)]


def test_a_script_names_hosts_or_none_yet():
    hosts = ScriptHosts("echo h2:2; echo h1; echo h1", 3)
    assert hosts.find() == hosts.find() == [("h2", 2), ("h1", 3)]
    assert ScriptHosts("true").find() == []


def running():
    """Return the processes below this one."""
    return {one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo not there >&2; exit 3", "exit code 3; it said: not there"),
        ("echo h1:x", "line 1, 'h1:x'"),
        ("yes h1:1", "more than 1 MiB"),
        ("trap '' TERM; echo waits >&2; exec >&- 2>&-; sleep 300", "did not end within 1 s; it said: waits"),
    ],
)
def test_a_script_that_fails_is_named_and_leaves_nothing_behind(text, words):
    before = running()
    since = time.monotonic()
    with pytest.raises(DiscoveryError) as failed:
        ScriptHosts(text, run_seconds=1 if "did not end" in words else 60).find()
    assert text in failed.value.problem
    assert words in failed.value.problem
    assert time.monotonic() - since < 120
    assert running() <= before


def test_the_last_good_answer_stays_and_a_new_error_is_said_once():
    one, two = [HostSlots("h1", 2)], [HostSlots("h1", 2), HostSlots("h2", 2)]
    down, other = DiscoveryError("no network"), DiscoveryError("other")
    said, script = [], Mock(find=Mock(side_effect=[one, down, down, other, two, [], down]))
    watch = HostWatch(script, said.append, 600)
    watch.start()
    seen = []
    for _ in range(6):
        watch.look()
        seen.append(watch.hosts())
    watch.close()
    assert seen == [one, one, one, two, two, two]
    found, gone = "host discovery works again: 4 slots", "the host discovery script no longer names a host"
    assert [text.split("\n")[0] for text in said] == ["no network", "other", found, gone, "no network"]
    assert "remain" in said[0]


def test_a_script_that_never_succeeded_is_an_error():
    with pytest.raises(DiscoveryError, match="exit code 1"):
        HostWatch(ScriptHosts("exit 1"), print).start()


def limits(slots=4, environ=None, is_fixed=True, **given):
    return make_limits(**{"wanted": 2, **given}, slots=slots, environ=environ or {}, is_fixed=is_fixed)


def test_by_default_a_job_has_the_workers_that_were_asked_for_or_grows_to_the_slots_of_a_script():
    assert limits() == Limits(2, 2, 2, start_timeout=60, elastic_timeout=600, cooldown_seconds=(5, 300))
    assert [limits(slots, is_fixed=False).most for slots in (1, 9, 900)] == [2, 9, 256]


def test_the_users_numbers_and_those_of_the_environment_count():
    environ = {"HOROVOD_START_TIMEOUT": "9", "HOROVOD_ELASTIC_TIMEOUT": "8"}
    environ |= {"HVDTRAIN_HOST_SILENCE_SECONDS": "7"}
    assert limits(environ=environ) == Limits(2, 2, 2, start_timeout=9, elastic_timeout=8, silence_seconds=7)
    given = {"start_timeout": 5, "elastic_timeout": 6, "reset_limit": 0}
    found = limits(environ=environ, least=1, most=3, cooldown=(1, 2), **given)
    assert found == Limits(2, 1, 3, silence_seconds=7, cooldown_seconds=(1, 2), **given)
    assert limits(environ={"HVDTRAIN_HOST_SILENCE_SECONDS": "0"}).silence_seconds > 1e5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"least": 3}, "--min-np 3 is greater"),
        ({"most": 1}, "--max-np 1 is smaller"),
        ({"wanted": 0, "least": 0}, "-np 0"),
        ({"most": 300}, "--max-np 300: an elastic job has at most 256"),
        ({"wanted": 5}, "-np 5: the hosts have 4 slots"),
        ({"cooldown": (0, 5)}, "--blacklist-cooldown-range 0 5"),
        ({"start_timeout": 0}, "--start-timeout 0"),
        ({"environ": {"HOROVOD_ELASTIC_TIMEOUT": "soon"}}, "HOROVOD_ELASTIC_TIMEOUT=soon"),
    ],
)
def test_limits_that_contradict_themselves_are_refused(given, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        limits(**given)
