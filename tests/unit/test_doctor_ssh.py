"""How the doctor logs in on other hosts, and how it explains that ssh failed."""

from hvdtrain.tools.doctor.coordinator import SshOptions, agent_script


def test_what_is_passed_on_over_ssh_holds_no_secret():
    script = agent_script({"PATH": "/a b", "AWS_SECRET_ACCESS_KEY": "hunter2", "PYTHONPATH": "/p"})
    assert "'/a b'" in script
    assert "hunter2" not in script
    command = SshOptions(port=2222).command("h2")
    assert command[-1] == "h2"
    assert "StrictHostKeyChecking" not in " ".join(command)
