"""How the doctor logs in on other hosts, and how it explains that ssh failed."""

import pytest

from hvdtrain.tools.doctor.coordinator import SshOptions, agent_script, explain_failure


@pytest.mark.parametrize(
    ("stderr", "check", "found"),
    [
        ("ssh: Could not resolve hostname h2: Name or service not known", "name", "does not resolve"),
        ("h2: Permission denied (publickey).", "ssh", "refuses the ssh key"),
        ("connect to host h2 port 22: Connection refused", "ssh", "nothing listens"),
        ("connect to host h2 port 22: No route to host", "ssh", "no route to it"),
        ("connect to host h2 port 22: Connection timed out", "ssh", "does not respond on its ssh port"),
        ("No ED25519 host key is known\nHost key verification failed.", "ssh", "not known"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "ssh", "differs from"),
        ("something new", "ssh", "something new"),
    ],
)
def test_failures_of_ssh_are_told_apart(stderr, check, found):
    finding = explain_failure("h2", 255, stderr, over_ssh=True)
    assert (finding.host, finding.check, finding.status) == ("h2", check, "fail")
    assert found in finding.found
    assert finding.remedy


def test_what_is_passed_on_over_ssh_holds_no_secret():
    script = agent_script({"PATH": "/a b", "AWS_SECRET_ACCESS_KEY": "hunter2", "PYTHONPATH": "/p"})
    assert "'/a b'" in script
    assert "hunter2" not in script
    command = SshOptions(port=2222).command("h2")
    assert command[-1] == "h2"
    assert "StrictHostKeyChecking" not in " ".join(command)
