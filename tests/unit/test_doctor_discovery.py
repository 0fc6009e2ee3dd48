"""The doctor's check of a discovery script."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvdtrain.cli import cli
from hvdtrain.doctor.discovery import check_discovery
from hvdtrain.errors import DiscoveryError, UsageError


def found_by(script, slots_per_host=1):
    hosts, findings = check_discovery(script, slots_per_host)
    return hosts, [(finding.host, finding.status, finding.found) for finding in findings]


def test_a_good_script_is_ok():
    hosts, findings = found_by("echo h1; echo h2:4", 2)
    assert hosts == [("h1", 2), ("h2", 4)]
    assert findings == [("h1", "ok", "2 hosts with 6 slots")]


def test_a_host_that_is_named_twice_is_a_warning():
    ((_, status, text),) = found_by("echo h1; echo h1")[1]
    assert status == "warn"
    assert "h1 is named twice" in text


@pytest.mark.parametrize(
    ("even", "odd", "words"),
    [
        ("h1:1\nh2:1", "h2:1\nh1:1", "varying order"),
        ("h1:1\nh2:1", "h1:1", "different hosts"),
    ],
)
def test_a_script_that_varies_is_a_warning(tmp_path, even, odd, words):
    (tmp_path / "0").write_text(even)
    (tmp_path / "1").write_text(odd)
    script = f"cd {tmp_path}; echo >>runs; cat $(($(wc -l <runs) % 2))"
    ((_, status, text),) = found_by(script)[1]
    assert status == "warn"
    assert words in text


def test_a_slow_script_is_a_warning(monkeypatch):
    monkeypatch.setattr("hvdtrain.doctor.discovery._SLOW_SECONDS", 0.01)
    assert "a run took" in found_by("sleep 0.1; echo h1")[1][0][2]


@pytest.mark.parametrize(("script", "words"), [("exit 2", "exit code 2"), ("true", "names no host")])
def test_a_script_without_hosts_is_an_error(script, words):
    with pytest.raises(DiscoveryError, match=words):
        check_discovery(script, 1)


def test_one_way_to_name_hosts_is_enough():
    result = CliRunner().invoke(cli, ["doctor", "-H", "h1:1", "--host-discovery-script", "echo h1"])
    assert isinstance(result.exception, UsageError)
    assert "Give one of them" in str(result.exception)


def test_the_command_checks_the_hosts_that_the_script_prints(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "doctor", "--quick", "--json", "--framework", "torch",
         "--run-dir", str(tmp_path), "--host-discovery-script", "echo localhost"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert [(host["name"], host["slots"]) for host in document["hosts"]] == [("localhost", 1)]
    assert document["findings"][0]["check"] == "host discovery"
