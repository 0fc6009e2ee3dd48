"""What pools run for test_evaluation_metrics.py."""

from pathlib import Path

import numpy as np

from hvdtrain.backends import load_backend
from hvdtrain.backends.objective import metric_states as metric_merging
from hvdtrain.backends.objective.stateful_metrics import Part
from hvdtrain.config import Layer
from hvdtrain.data.training_data import TrainingData
from hvdtrain.jobs.opening.setup import open_together
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
            task_data, *_ = open_together(job, backend)
            backend.build(task_data.task, job.config)
            data = task_data.eval_data
            given = TrainingData(job.config, backend.workers, task_data.train_data, data)
            session = Session(job.config, backend, given, Services(Report(), Path()))
            found[name] = evaluate(session, session.plan())
            assert repr(evaluate(session, session.plan())) == repr(found[name])
    return found


def merged(framework: str) -> None:
    """Merge parts of which each worker has another number of rows, in chunks of two rows."""
    backend = load_backend(prepare([Layer("options", {"framework": framework, **FIELDS})]).config)
    workers, collectives = backend.workers, _collectives(framework)
    count = 5 * workers.rank  # rank 0 has none
    indices = np.arange(count) * workers.size + workers.rank
    rows = np.stack([indices, indices + 0.5], 1)
    parts = {
        "one": {
            "rows": Part(rows, "gather", indices),
            "flags": Part(indices % 2 == 0, "gather", indices),
            "by rank": Part(np.full(1 + workers.rank, workers.rank, np.int16), "gather"),
            "sums": Part(np.full((2, 2), 0.1 + workers.rank), "sum"),
        },
        "other": {
            "count": Part(np.array(workers.rank), "sum"),
            "max": Part(np.array([workers.rank, 1]), "max"),
            "min": Part(np.array([workers.rank, -1]), "min"),
            "stack": Part(np.array([workers.rank] * 2), "stack"),
        },
    }
    before = metric_merging._CHUNK_BYTES
    metric_merging._CHUNK_BYTES = 32
    try:
        found = metric_merging.merge(parts, workers, collectives)
    finally:
        metric_merging._CHUNK_BYTES = before
    if workers.rank:
        return
    ranks = range(workers.size)
    wanted = np.sort(np.concatenate([np.arange(5 * rank) * workers.size + rank for rank in ranks]))
    np.testing.assert_array_equal(found["one"]["rows"], np.stack([wanted, wanted + 0.5], 1))
    np.testing.assert_array_equal(found["one"]["flags"], wanted % 2 == 0)
    assert found["one"]["by rank"].tolist() == [rank for rank in ranks for _ in range(rank + 1)]
    assert found["one"]["by rank"].dtype == np.int16
    np.testing.assert_allclose(found["one"]["sums"], np.full((2, 2), sum(0.1 + rank for rank in ranks)))
    assert found["other"]["count"] == sum(ranks)
    assert found["other"]["max"].tolist() == [workers.size - 1, 1]
    assert found["other"]["min"].tolist() == [0, -1]
    assert found["other"]["stack"].tolist() == [[rank] * 2 for rank in ranks]


def _collectives(framework: str) -> metric_merging.Collectives:
    if framework == "torch":
        from hvdtrain.backends.torch.objective.evaluation import HorovodCollectives
    else:
        from hvdtrain.backends.tensorflow.objective.evaluation import HorovodCollectives
    return HorovodCollectives()
