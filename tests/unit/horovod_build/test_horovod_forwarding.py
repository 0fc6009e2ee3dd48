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
CONTROLLERS = ["gloo", *(["mpi"] if shutil.which("mpirun") else [])]


@pytest.fixture(scope="module")
def launcher(patched, tmp_path_factory) -> Path:
    """A copy of the patched runner that believes to have been built with MPI and Gloo."""
    folder = tmp_path_factory.mktemp("launcher")
    shutil.copytree(patched / "horovod", folder / "horovod")
    record = {"have_mpi": True, "have_gloo": True, "pytorch": "2"}
    (folder / "horovod" / "metadata.json").write_text(json.dumps(record))
    return folder


def horovodrun(launcher: Path, controller: str, folder: Path, stdout, *worker: str, **changes: str):
    """Run two workers, which print more than a pipe holds if no other code is given."""
    code = worker or (WORKER,)
    command = [sys.executable, "-c", LAUNCHER, f"--{controller}", "-np", "2", sys.executable, "-c", *code]
    if controller == "mpi":
        command.insert(3, "--binding-args=--bind-to none --oversubscribe")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | {
        "PYTHONPATH": str(launcher),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_prte_local_tmpdir_base": str(folder),
        **changes,
    }
    return subprocess.run(
        command, cwd=folder, env=environ, stdout=stdout, stderr=subprocess.PIPE, timeout=300, check=False
    )


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("output", ["a pipe", "a full disk", "a reader that went away"])
def test_any_byte_reaches_the_output_and_one_that_takes_nothing_ends_no_job(
    launcher, controller, output, tmp_path
):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as broken:
        stdout = {"a pipe": subprocess.PIPE, "a full disk": full}.get(output, broken)
        done = horovodrun(launcher, controller, tmp_path, stdout)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert (tmp_path / "done").read_text() == "done done "
    if output == "a pipe":
        lines = done.stdout.splitlines()
        assert len(lines) == 2 * (LINES + 1)
        assert sum(b"caf" in line for line in lines) == 2
    else:
        why = "No space left on device" if output == "a full disk" else "Broken pipe"
        assert said.count(f"horovodrun: cannot write to standard output: {why}. Output is dropped") == 1


SAYS = """
import os, sys, time
from pathlib import Path
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
print(f"said by {rank} with seed {os.environ['PYTHONHASHSEED']}", flush=True)
Path(rank).touch()
while not (Path("0").exists() and Path("1").exists()):
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("controller", "code", "is_shown"), [("mpi", 2, False), ("mpi", 9, True), ("gloo", 2, False)]
)
def test_lines_of_rank_0_have_no_tag_and_an_explained_exit_code_no_report(
    launcher, tmp_path, controller, code, is_shown
):
    if controller not in CONTROLLERS:
        pytest.skip("mpirun is not installed")
    own, seed = ({}, "0") if code == 2 else ({"PYTHONHASHSEED": "random"}, "random")  # one for all workers
    done = horovodrun(launcher, controller, tmp_path, subprocess.PIPE, SAYS, str(code), **own)
    output = done.stdout.decode()
    tag = "[1]<stdout>:" if controller == "gloo" else "[1,1]<stdout>: "
    assert done.returncode == code
    assert sorted(line.strip() for line in output.splitlines() if "said" in line) == sorted(
        [f"said by 0 with seed {seed}", f"{tag}said by 1 with seed {seed}"]
    )
    assert ("prterun" in output + done.stderr.decode()) == is_shown
