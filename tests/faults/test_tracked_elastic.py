"""A tracked elastic job whose rank 0 is killed: another worker continues the same run."""

import json
import os
import signal

import pytest
from support.elastic_jobs import HOLD, ElasticJob
from support.jobs import LIMIT_SECONDS, run

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")


def test_the_run_goes_on_when_another_worker_becomes_rank_0(tmp_path):
    uri = f"sqlite:///{tmp_path}/runs.db"
    client = mlflow.MlflowClient(uri)
    client.search_experiments()  # which makes the tables
    options = ("--track", "mlflow", "--log-every", "2")
    slow = {"HVDTRAIN_TEST_STEP_SECONDS": "0.05", "MLFLOW_TRACKING_URI": uri}
    with ElasticJob("torch", tmp_path, *options, workers=2, **slow) as job:
        job.hold()  # until the sender has loaded its library
        job.wait_for_step(2)
        job.until((tmp_path / "run" / "tracking" / "mlflow.json").exists)
        os.kill(job.members()[0], signal.SIGKILL)
        (tmp_path / HOLD).unlink()
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    if "track run --to mlflow" in result.stdout:  # on a busy machine the library loads too late
        sent = run(["python", "-m", "hvdtrain", "track", "run"], tmp_path, MLFLOW_TRACKING_URI=uri)
        assert sent.returncode == 0, sent.output
    (found,) = client.search_runs(["0"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {point.step for point in client.get_metric_history(found.info.run_id, "train/loss")}
    assert logged == {line["step"] for line in lines if line["phase"] == "train"}
    assert found.info.status == "FINISHED"
    assert any("rank 0 is on" in found.data.tags[name] for name in found.data.tags if ".resumed." in name)
    assert "event/workers" in found.data.metrics
