"""The files of examples/elastic do what their comments say."""

import os
import shlex
import subprocess

from support.documents import ROOT

from hvdtrain.cli import cli
from hvdtrain.elastic.hosts import ScriptHosts
from hvdtrain.elastic.limits import workers_of_slurm

FOLDER = ROOT / "examples" / "elastic"


def test_the_discovery_script_prints_the_file_of_hosts(tmp_path, monkeypatch):
    (tmp_path / "hosts.txt").write_text("host1:2\nhost2:2\n")
    (tmp_path / "others").write_text("host3\n")
    monkeypatch.chdir(tmp_path)
    script = ScriptHosts(str(FOLDER / "hosts.sh"))
    assert script.find() == [("host1", 2), ("host2", 2)]
    monkeypatch.setenv("HVDTRAIN_HOSTS", "others")
    assert script.find() == [("host3", 1)]


def test_the_job_script_starts_a_driver_and_one_step(tmp_path):
    """srun and hvdtrain are recorded, and scontrol requeues the job that stopped."""
    for name, code in (("python", 75), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >>{tmp_path}/{name}.log\nexit {code}\n')
        program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
    words = ["bash", str(FOLDER / "train.sbatch"), "--framework", "torch", "--epochs", "30"]
    assert subprocess.run(words, env=environ, check=False).returncode == 75
    assert (tmp_path / "scontrol.log").read_text().split() == ["scontrol", "requeue", "7"]
    _, *words = (tmp_path / "python.log").read_text().split()
    assert words[:3] == ["-m", "hvdtrain", "elastic"]
    context = cli.commands["elastic"].make_context("elastic", words[3:], **cli.context_settings)
    assert (context.params["num_proc"], context.params["least"]) == (4, 1)
    step = list(context.params["command"])
    assert step[0] == "srun"
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set(step)
    training = step[step.index("hvdtrain") + 1 :]
    options = cli.commands["train"].make_context("train", training, **cli.context_settings).params
    assert (options["framework"], options["resume"], options["epochs"]) == ("torch", "auto", 30)


def test_the_job_scripts_options_are_those_that_sbatch_takes():
    lines = (FOLDER / "train.sbatch").read_text().splitlines()
    given = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines if line.startswith("#SBATCH")]
    assert "--no-kill" in given
    assert "--signal=USR2@120" in given


def test_the_command_without_a_number_of_workers_takes_that_of_slurm():
    assert workers_of_slurm({"SLURM_NTASKS": "4"}) == 4
    assert workers_of_slurm({"SLURM_NTASKS": "0"}) is None
    assert workers_of_slurm({}) is None
