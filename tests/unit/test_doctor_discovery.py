"""The doctor's check of a discovery script."""

import json
import subprocess
import sys

import pytest

from hvdtrain.errors import DiscoveryError
from hvdtrain.tools.doctor.coordinator import check_discovery


def found_by(script, slots_per_host=1):
    hosts, findings = check_discovery(script, slots_per_host)
    return hosts, [(finding.host, finding.status, finding.found) for finding in findings]


def test_a_good_script_is_ok():
    hosts, findings = found_by("echo h1; echo h2:4", 2)
    assert hosts == [("h1", 2), ("h2", 4)]
    assert findings == [("h1", "ok", "2 hosts with 6 slots")]


@pytest.mark.parametrize(("script", "words"), [("exit 2", "exit code 2"), ("true", "names no host")])
def test_a_script_without_hosts_is_an_error(script, words):
    with pytest.raises(DiscoveryError, match=words):
        check_discovery(script, 1)


def test_the_command_checks_the_hosts_that_the_script_prints(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "doctor", "--quick", "--json", "--framework", "torch",
         "--run-dir", str(tmp_path), "--host-discovery-script", "echo localhost"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert [(host["name"], host["slots"]) for host in document["hosts"]] == [("localhost", 1)]
    assert document["findings"][0]["check"] == "host discovery"
