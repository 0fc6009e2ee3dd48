"""The commands of docs/clusters.md on plain ssh and MPI, and the READMEs' one, as they stand."""

import json
import re
from pathlib import Path

import pytest
from cluster_jobs import YIELDING
from hosts import Cluster
from support.documents import ROOT, blocks, commands

# The reader of a block that starts with `kill` has seen that the job trains.
TRAINS = "until cat {}/metrics.jsonl >seen 2>/dev/null && [ -s seen ]; do kill -0 $!; sleep 0.1; done\n"


def scripts(section: str, folder: Path) -> list[str]:
    """Give a section's shell blocks in order, their jobs shortened to a few steps."""
    text = (ROOT / "docs" / "clusters.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (folder / "section.md").write_text(text)
    return [shortened(block.text) for block in blocks(folder / "section.md") if block.language == "bash"]


def shortened(script: str) -> str:
    lines = []
    for line in script.splitlines():
        short = line.replace("--epochs 30", "--epochs 6")
        lines.append(f"{short} --steps 5\n" if "--framework" in line and short == line else f"{short}\n")
    return "".join(lines)


def joined(parts: list[str]) -> str:
    """Give one script of blocks; a block that stops a job waits until the job trains."""
    script, folder = "", ""
    for part in parts:
        script += TRAINS.format(folder) if part.startswith("kill") else ""
        script += part
        folder = re.findall(r"--run-dir (\S+)", f"--run-dir none {part}")[-1]
    return script


def summary(folder: Path, name: str) -> tuple:
    found = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found["status"], found["framework"], found["workers"]


@pytest.fixture
def cluster(tmp_path):
    with Cluster({"host1": 8, "host2": 8}, shared=tmp_path) as cluster:
        yield cluster


def test_plain_ssh_from_the_first_key_to_a_job_that_went_on(cluster, tmp_path):
    make_key, *others = scripts("Plain ssh", tmp_path)
    head, other = cluster.hosts.values()
    head.run(["sh", "-c", "rm ~/.ssh/id_ed25519"])
    assert head.run(["ssh", "-o", "BatchMode=yes", "host2", "true"]).returncode == 255
    assert head.run(["bash", "-ec", make_key]).returncode == 0
    # In the place of the password that ssh-copy-id would ask for: these hosts have none
    key = head.run(["sh", "-c", "cat ~/.ssh/id_ed25519.pub"]).stdout
    other.run(["sh", "-c", 'echo "$0" >>~/.ssh/authorized_keys', key])

    result = head.run(["bash", "-ec", joined(others)], cwd=tmp_path, timeout=500, **YIELDING)
    assert result.returncode == 0, result.output[-5000:]
    assert "host2\n" in result.stdout
    assert result.stdout.count("4 on 2 hosts (host1: 2, host2: 2), coordinated by Gloo") == 2
    assert "4 on 2 hosts (host1: 2, host2: 2), coordinated by MPI" in result.stdout
    assert summary(tmp_path, "first") == ("completed", "torch", 4)
    assert summary(tmp_path, "second") == ("completed", "tf", 4)
    went_on(result.stdout, summary(tmp_path, "long"))


def test_mpirun_from_a_first_job_to_one_that_went_on(cluster, tmp_path):
    (tmp_path / "hosts.txt").write_text("host1 slots=2\nhost2 slots=2\n")  # of the section before
    script = joined(scripts("MPI", tmp_path))
    result = cluster.head.run(["bash", "-ec", script], cwd=tmp_path, timeout=500, **YIELDING)
    assert result.returncode == 0, result.output[-5000:]
    assert summary(tmp_path, "by-mpirun") == ("completed", "torch", 4)
    assert summary(tmp_path, "by-file") == ("completed", "tf", 4)
    went_on(result.stdout, summary(tmp_path, "stopped"))


def went_on(said: str, ended: tuple) -> None:
    """See that a job was stopped with a checkpoint, and taken up by three workers."""
    assert "ended with 75" in said
    assert "3 on 2 hosts (host1: 2, host2: 1)" in said
    assert "starts from" in said
    assert ended == ("completed", "torch", 3)


@pytest.mark.alone
def test_the_command_of_the_readmes_for_several_hosts(cluster, tmp_path):
    documented = [
        [words for words in commands(ROOT / name) if "host1:8,host2:8" in words]
        for name in ("README.md", "README.zh-CN.md")
    ]
    assert documented[0] == documented[1]
    (words,) = documented[0]
    result = cluster.head.run([*words, "--steps", "2"], cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.output[-5000:]
    assert "16 on 2 hosts (host1: 8, host2: 8), coordinated by MPI" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert summary(tmp_path, folder.name) == ("completed", "torch", 16)
