"""A real job is followed from another process, and drawn while it trains."""

import time

from support.jobs import LIMIT_SECONDS, run, started

JOB = [
    "python", "-m", "hvdtrain", "--framework", "torch", "--task", "digits", "--epochs", "1000",
    "--run-dir", "run", "--log-every", "5", "--set", "threads=1",
]  # fmt: skip
HVDTRAIN = ["python", "-m", "hvdtrain"]


def wait_for(condition, seconds=LIMIT_SECONDS):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_job_is_followed_over_a_stop_and_a_resume_to_its_end(tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    with started([*HVDTRAIN, "watch", "run", "--wait", str(LIMIT_SECONDS)], tmp_path) as watch:
        with started(JOB, tmp_path) as job:
            wait_for(lambda: log.exists() and log.stat().st_size > 20_000)
            drawn = run([*HVDTRAIN, "report", "run", "-o", "page.html"], tmp_path)
            job.process.terminate()
            assert job.wait(LIMIT_SECONDS).returncode == 75
        compared = run([*HVDTRAIN, "compare", "run", "--csv"], tmp_path)
        resumed = run([*JOB, "--resume", "--early-stopping", "accuracy:min"], tmp_path)
        watched = watch.wait(LIMIT_SECONDS)
    assert drawn.returncode == resumed.returncode == watched.returncode == 0, drawn.output + resumed.output
    page = (tmp_path / "page.html").read_text()
    assert "<td>running</td>" in page
    assert "<td>verified</td>" in page
    assert "stopped" in compared.stdout.splitlines()[1]
    assert watched.stdout.count("run: running: process") == 2
    assert "run: stopped; " in watched.stdout
    assert "run: completed; " in watched.stdout
    assert " left" in watched.stdout
