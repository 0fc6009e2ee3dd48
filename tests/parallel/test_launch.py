"""Workers that a script launches: results and errors come back; errors that all have leave Horovod up."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.documents import ROOT, named_files
from support.jobs import run

SECONDS = 300  # far less than the workers sleep that are to be ended
SCRIPT = Path(__file__).with_name("launching_script.py")
FAILS = """
import time
import hvdtrain

def work():
    import os
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == 1:
        raise ValueError("it went wrong")
    time.sleep(1000)

try:
    hvdtrain.launch(work, controller="{controller}")
except hvdtrain.errors.WorkerFailure as error:
    print("CAUGHT", error.problem)
    print(error.remedy)
"""

FAILS_ALONE = """
import os
import hvdtrain
from hvdtrain.tasks.digits import Digits

def work():
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

    class FailsAlone(Digits):
        def train_data(self):
            if rank == 1:
                raise ValueError("there is no data")
            return super().train_data()

    for task in (FailsAlone, Digits):
        try:
            print("END", rank, hvdtrain.train(task, framework="torch", steps=2, quiet=True).status)
        except hvdtrain.errors.HvdtrainError as error:
            print("END", rank, type(error).__name__, error.problem)

hvdtrain.launch(work, controller="{controller}")
"""


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi")])
def test_a_function_trains_on_workers_and_gives_its_result(framework, controller, tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    result = run(["python", SCRIPT.name, framework, controller], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    found = json.loads(re.findall(r"FOUND (.*)", result.stdout)[0])
    assert found["failures"] == ["NonFiniteLossError", "TaskError", "ConfigError"]
    assert found["phases"] == [[phase, step] for step in (10, 20, 30, 40) for phase in ("train", "eval")]
    assert set(found["best"]) == {"loss", "accuracy"}
    assert found["best"]["loss"][0] <= found["loss"] + 1e-6
    assert found["rows"] == 359
    assert found["difference"] < 1e-5
    assert found["imported"] < 1e-5
    digests = re.findall(r"DIGEST (.*)", result.stdout)
    assert len(digests) == 2
    assert digests[0] == digests[1]  # every rank has the same


@pytest.mark.parametrize("controller", ["gloo"])
def test_the_error_of_a_worker_comes_back_and_the_others_end(controller, tmp_path):
    (tmp_path / "job.py").write_text(FAILS.format(controller=controller))
    result = run(["python", "job.py"], tmp_path, timeout=SECONDS)
    assert re.search(r"^CAUGHT rank 1 on \S+: ValueError: it went wrong$", result.stdout, re.MULTILINE)
    assert 'raise ValueError("it went wrong")' in result.stdout


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_after_the_error_of_one_worker_alone(controller, tmp_path):
    """All train again over Gloo; over MPI Horovod cannot start again, which is said."""
    (tmp_path / "job.py").write_text(FAILS_ALONE.format(controller=controller))
    result = run(["python", "job.py"], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    ends = {rank: re.findall(rf"END {rank} (.*)", result.stdout) for rank in (0, 1)}
    assert ends[0][0].startswith("PeerLostError")
    assert ends[1][0].startswith("TaskError")
    for _, second in ends.values():
        if controller == "gloo":
            assert second == "completed"
        else:
            assert re.match("EnvironmentFault .* over MPI it starts once", second)


def test_the_page_from_python_shows_scripts_that_run(tmp_path):
    shown = {}
    for name, text in named_files(ROOT / "docs" / "python.md").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        result = run(["python", name], tmp_path)
        assert result.returncode == 0, result.output[-5000:]
        shown[name] = result.stdout
    assert list(shown) == ["from_python.py", "retries.py"]
    assert shown["from_python.py"].startswith("completed runs/digits-torch-")
    assert "again: the loss is nan" in shown["retries.py"]
    assert "'accuracy'" in shown["retries.py"]
