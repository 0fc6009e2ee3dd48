"""The doctor's table and its JSON document."""

import json
import subprocess
import sys

from doctor_reports import INFO, changed, make_report
from rich.console import Console

from hvdtrain.tools.doctor.checks_network import diagnose
from hvdtrain.tools.doctor.table import show


def shown(*info, width=100, **more) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(diagnose(make_report(*info, **more), "ssh"), console)
        return console.export_text()


def test_a_problem_of_several_hosts_is_shown_once_with_its_remedy():
    bad = changed(software__versions__PyTorch="2.12.0")
    text = shown(INFO, bad, bad, INFO, INFO)
    assert text.count("FAIL") == 1
    assert "FAIL  h2, h3: PyTorch: 2.12.0; 2.13.0 on h1, h4, h5" in text
    assert "Install the same version" in text
    assert "a job would fail because of h2, h3" in text


def test_the_command_checks_this_host_without_a_framework_loaded_here(tmp_path):
    words = [sys.executable, "-m", "hvdtrain", "doctor", "--quick", "--json", "--framework", "torch"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"], done.stderr
    assert document["how"] == "this host alone"
    assert list(tmp_path.iterdir()) == []
