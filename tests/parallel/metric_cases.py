"""What pools run for test_evaluation_metrics.py."""

from pathlib import Path
from unittest import mock

import numpy as np

from hvdtrain.backends import load_backend
from hvdtrain.backends.objective import stateful_metrics
from hvdtrain.config import Layer
from hvdtrain.data.training_data import TrainingData
from hvdtrain.jobs.opening.setup import opened
from hvdtrain.jobs.opening.start import prepare
from hvdtrain.reporting.report import Report
from hvdtrain.session import Services, Session
from hvdtrain.step_end import evaluate
from hvdtrain.workers.seeding import seeded_frameworks

TASKS = Path(__file__).with_name("metric_tasks.py")
FIELDS = {"device": "cpu", "threads": 1, "initial_parameters": "portable"}


def evaluated(framework: str, tasks: list[str]) -> dict[str, dict[str, float]]:
    """Evaluate the untrained models of tasks twice; return the metrics of each."""
    found = {}
    for name in tasks:
        with seeded_frameworks():
            job = prepare([Layer("options", {"framework": framework, "task": f"{TASKS}:{name}", **FIELDS})])
            backend = load_backend(job.config)
            task_data = opened(job, backend).task_data
            backend.build(task_data.task, job.config)
            data = task_data.eval_data
            given = TrainingData(job.config, backend.workers, task_data.train_data, data)
            session = Session(job.config, backend, given, Services(Report(), Path()))
            found[name] = evaluate(session, session.plan())
            assert repr(evaluate(session, session.plan())) == repr(found[name])
    return found


def gathered(framework: str) -> None:
    """Gather what differs in size between workers on rank 0, in chunks of 32 bytes."""
    backend = load_backend(prepare([Layer("options", {"framework": framework, **FIELDS})]).config)
    workers = backend.workers
    value = {"rows": np.arange(5 * workers.rank) + 0.5, "flags": [np.zeros(workers.rank, bool)]}
    with mock.patch.object(stateful_metrics, "_CHUNK_BYTES", 32):
        found = stateful_metrics.on_rank_zero(value, workers)
    assert len(found) == (workers.size if workers.rank == 0 else 0)
    for rank, of_worker in enumerate(found):
        np.testing.assert_array_equal(of_worker["rows"], np.arange(5 * rank) + 0.5)
        np.testing.assert_array_equal(of_worker["flags"][0], np.zeros(rank, bool))
