"""horovodrun's output: any byte of a worker passes, and what its output does not take is dropped.

The patched launcher runs real commands, without a compiled Horovod.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINES = 3000  # several times what a pipe holds
WORKER = f"""
import sys
sys.stdout.buffer.write(b"caf\\xe9\\n")
for number in range({LINES}):
    print("x" * 60, number, flush=True)
open("done", "a").write("done ")
"""
LAUNCHER = "import sys; from horovod.runner.launch import run_commandline as run; sys.exit(run())"
DROPPED = "horovodrun: cannot write to standard output: {}. Output is dropped"
CONTROLLERS = pytest.mark.parametrize(
    "controller",
    [
        "gloo",
        pytest.param(
            "mpi", marks=pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")
        ),
    ],
)


@pytest.fixture(scope="module")
def launcher(patched, tmp_path_factory) -> Path:
    """A copy of the patched runner that believes to have been built with MPI and Gloo."""
    folder = tmp_path_factory.mktemp("launcher")
    shutil.copytree(patched / "horovod", folder / "horovod")
    record = {"have_mpi": True, "have_gloo": True, "pytorch": "2"}
    (folder / "horovod" / "metadata.json").write_text(json.dumps(record))
    return folder


def horovodrun(
    launcher: Path, controller: str, folder: Path, stdout: object, *worker: str
) -> subprocess.CompletedProcess:
    """Run two workers, which print more than a pipe holds if no other code is given."""
    code = worker or (WORKER,)
    command = [sys.executable, "-c", LAUNCHER, f"--{controller}", "-np", "2", sys.executable, "-c", *code]
    if controller == "mpi":
        command.insert(3, "--binding-args=--bind-to none --oversubscribe")
    environ = {
        **os.environ,
        "PYTHONPATH": str(launcher),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_prte_local_tmpdir_base": str(folder),
    }
    return subprocess.run(
        command, cwd=folder, env=environ, stdout=stdout, stderr=subprocess.PIPE, timeout=300, check=False
    )


def check_it_ended_well(done: subprocess.CompletedProcess, folder: Path) -> None:
    assert done.returncode == 0, done.stderr.decode()
    assert (folder / "done").read_text() == "done done "


@CONTROLLERS
def test_a_byte_that_is_no_utf8_reaches_the_output(launcher, controller, tmp_path):
    done = horovodrun(launcher, controller, tmp_path, subprocess.PIPE)
    check_it_ended_well(done, tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * (LINES + 1)
    assert sum(b"caf" in line for line in lines) == 2


@CONTROLLERS
def test_a_full_disk_stalls_no_job(launcher, controller, tmp_path):
    with open("/dev/full", "w") as full:
        done = horovodrun(launcher, controller, tmp_path, full)
    check_it_ended_well(done, tmp_path)
    assert done.stderr.decode().count(DROPPED.format("No space left on device")) == 1


@CONTROLLERS
def test_a_reader_that_goes_away_ends_no_job(launcher, controller, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        done = horovodrun(launcher, controller, tmp_path, output)
    check_it_ended_well(done, tmp_path)
    assert done.stderr.decode().count(DROPPED.format("Broken pipe")) == 1


def test_lines_of_rank_0_have_no_tag_and_an_explained_exit_code_no_report(launcher, tmp_path):
    worker = (
        "import os, sys, time; rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['HOROVOD_RANK']\n"
        "print(f'said by {rank}', flush=True); time.sleep(1); sys.exit(int(sys.argv[1]))"
    )
    for controller, code, is_shown in (("mpi", 2, False), ("mpi", 9, True), ("gloo", 2, False)):
        done = horovodrun(launcher, controller, tmp_path, subprocess.PIPE, worker, str(code))
        lines = done.stdout.decode().splitlines()
        assert (done.returncode, sorted(line.strip() for line in lines if "said" in line)) == (
            code,
            sorted(
                ["said by 0", "[1]<stdout>:said by 1" if controller == "gloo" else "[1,1]<stdout>: said by 1"]
            ),
        )
        assert ("prterun" in done.stdout.decode() + done.stderr.decode()) == is_shown
