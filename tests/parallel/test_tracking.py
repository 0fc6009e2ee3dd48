"""Runs in trackers: MLflow's own server and database, W&B's library without a server."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from support import wandb_files
from support.jobs import LIMIT_SECONDS, launcher, run, started, temporary_folder
from support.mlflow_server import MlflowServer

pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
for package in ("alembic", "flask", "flask_cors", "sqlalchemy", "uvicorn"):
    pytest.importorskip(package)

SLOW = f"{Path(__file__).with_name('tracked_task.py')}:Slow"
OPTIONS = ("--task", SLOW, "--log-every", "5", "--eval-every", "20", "--save-every", "20")


@pytest.fixture(scope="module")
def server():
    """Gives a server that runs."""
    # nobody else is given the port; the server, which also asks for reuse, is
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        found = MlflowServer(temporary_folder(), reserved.getsockname()[1])
        found.start()
        yield found
        found.kill()


@pytest.fixture
def client(server):
    return mlflow.MlflowClient(server.uri)


def changes(server) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": server.uri, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


def command(folder: str, *options: str, framework: str = "torch", workers: int = 1) -> list[str]:
    words = ["python", "-m", "hvdtrain", "--framework", framework, *OPTIONS, "--run-dir", folder, *options]
    return [*launcher(workers, "gloo" if workers > 1 else "none"), *words]


def lines_of(folder: Path) -> list[dict]:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def wait_for(condition, seconds: float = LIMIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def send_rest(result, folder: Path, name: str, server) -> None:
    """Send to the trackers what a job could not send in the seconds that it waits, if it says so."""
    for tracker in ("mlflow", "wandb"):
        if f"track {name} --to {tracker}" in result.stdout:
            words = ["python", "-m", "hvdtrain", "track", name, "--to", tracker]
            sent = run(words, folder, **changes(server))
            assert sent.returncode == 0, sent.output


def windows(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder) if line["phase"] == "train"}


def run_of(client, folder: Path):
    """Give the one run of a run directory."""
    tracking_id = json.loads((folder / "tracking" / "id.json").read_text())["id"]
    (found,) = client.search_runs(["0"], f"tags.`hvdtrain.id` = '{tracking_id}'")
    return found


def points(client, run_id: str, name: str = "train/loss") -> list[tuple[int, float]]:
    """Give the points of a metric in the order in which they were logged."""
    history = client.get_metric_history(run_id, name)
    return [(point.step, point.value) for point in sorted(history, key=lambda one: one.timestamp)]


def stopped_and_resumed(server) -> tuple[Path, int]:
    """Give a folder with both parts of the run, and the step where it was stopped."""
    folder = temporary_folder()
    first = command("one", "--steps", "9000", "--track", "mlflow,wandb", "--track-checkpoints")
    sent = [folder / "one" / "tracking" / f"{name}.json" for name in ("mlflow", "wandb")]
    with started(first, folder, **changes(server)) as job:
        # on a busy machine a library may take longer to load than the job waits at its end
        wait_for(lambda: len(lines_of(folder / "one")) > 12 and all(path.exists() for path in sent))
        os.kill(job.process.pid, signal.SIGTERM)
        stopped = job.wait(LIMIT_SECONDS)
    assert stopped.returncode == 75, stopped.output
    send_rest(stopped, folder, "one", server)
    step = json.loads((folder / "one" / "summary.json").read_text())["steps"]
    more = ("--steps", str(step + 30), "--resume", "one", "--track", "mlflow", "--track", "wandb")
    second = run(command("two", *more, framework="tf", workers=2), folder, **changes(server))
    assert second.returncode == 0, second.output
    send_rest(second, folder, "two", server)
    return folder, step


def test_a_run_resumed_in_the_other_framework_is_one_run(server, client):
    """In MLflow and in W&B. It was stopped, and resumed in TensorFlow elsewhere."""
    folder, step = stopped_and_resumed(server)
    (found,) = client.search_runs(["0"], "params.task LIKE '%tracked_task.py:Slow'")
    expected = {**windows(folder / "one"), **windows(folder / "two")}
    logged = points(client, found.info.run_id)
    assert [at for at, _ in logged] == sorted(expected)
    assert dict(logged) == pytest.approx(expected)
    assert found.info.status == "FINISHED"
    tags = found.data.tags
    assert f"after step {step}: " in tags[f"hvdtrain.resumed.{step}"]
    assert "framework torch -> tf" in tags[f"hvdtrain.resumed.{step}"]
    assert "workers 1 -> 2" in tags[f"hvdtrain.resumed.{step}"]
    assert len(tags["hvdtrain.task_sha256"]) == 64
    assert found.data.params["log_every"] == "5"
    names = [file.path for file in client.list_artifacts(found.info.run_id, "checkpoints")]
    assert f"checkpoints/step-{step:08}" in names
    files = [next((folder / name).glob("wandb/offline-run-*/*.wandb")) for name in ("one", "two")]
    ids = {wandb_files.run_id_of(path) for path in files}
    assert ids == {json.loads((folder / "two" / "tracking" / "id.json").read_text())["id"]}
    for path, name in zip(files, ("one", "two"), strict=True):
        rows = wandb_files.history_of(path)
        losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
        assert losses == pytest.approx(windows(folder / name))
        assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert [wandb_files.exit_code_of(path) for path in files] == [255, 0]
    assert f"after step {step}" in str(wandb_files.config_of(files[1])["resumed"])


def test_a_job_without_its_server_ends_well_and_its_run_is_sent_later(server, client, tmp_path):
    away = "http://127.0.0.1:9"
    down = {**changes(server), "MLFLOW_TRACKING_URI": away, "WANDB_BASE_URL": away}
    down |= {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40}
    result = run(command("run", "--steps", "20", "--track", "mlflow,wandb"), tmp_path, **down)
    assert result.returncode == 0, result.output
    assert result.stdout.count("5 lines of metrics.jsonl and how the run ended are not sent") == 2
    assert result.stdout.count("python -m hvdtrain track run --to ") == 2
    failed = run(["python", "-m", "hvdtrain", "track", "run"], tmp_path, **down)
    assert failed.returncode == 3, failed.output
    sent = run(["python", "-m", "hvdtrain", "track", "run"], tmp_path, **changes(server))
    assert sent.returncode == 0, sent.output
    found = run_of(client, tmp_path / "run")
    assert dict(points(client, found.info.run_id)) == pytest.approx(windows(tmp_path / "run"))
    assert found.info.status == "FINISHED"
