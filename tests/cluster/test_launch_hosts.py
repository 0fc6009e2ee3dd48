"""`hvdtrain.launch` starts workers on other hosts, which get the function and send back what came of it."""

from cluster_jobs import YIELDING
from hosts import Cluster

SCRIPT = """
import socket

import hvdtrain

GREETING = "from"


def work():
    summary = hvdtrain.train("digits", framework="torch", steps=2, threads=1, quiet=True, run_dir="{run}")
    print("WORKER", socket.gethostname(), flush=True)
    return GREETING, socket.gethostname(), summary.workers


def fails():
    if socket.gethostname() == "h2":
        raise ValueError("only there")
    return work()


print("FOUND", *hvdtrain.launch(work, hosts="{hosts}", controller="gloo"))
try:
    hvdtrain.launch(fails, hosts="{hosts}", controller="gloo")
except hvdtrain.errors.WorkerFailure as error:
    print("CAUGHT", error.problem)
"""


def test_a_function_runs_on_two_hosts(tmp_path):
    with Cluster({"h1": 1, "h2": 1}, shared=tmp_path) as cluster:
        script = tmp_path / "job.py"
        script.write_text(SCRIPT.format(hosts=cluster.words(), run=tmp_path / "run"))
        result = cluster.head.run(["python", str(script)], cwd=tmp_path, **YIELDING)
    assert result.returncode == 0, result.output[-5000:]
    assert "FOUND from h1 2\n" in result.stdout
    assert "WORKER h1" in result.stdout
    assert "WORKER h2" in result.stdout
    assert "CAUGHT rank 1 on h2: ValueError: only there\n" in result.stdout
