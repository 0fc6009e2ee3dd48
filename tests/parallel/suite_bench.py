"""Measuring steps inside a job: whatever its workers send to each other, and each worker on its own.

Run inside a job as ``suite_reduction.py`` is; ``test_bench.py`` does so.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.suite import config, started_backend  # noqa: F401

from hvdtrain.data.training_data import readers_for
from hvdtrain.jobs.opening.setup import TrainingRun, build_together, open_task_data
from hvdtrain.jobs.opening.start import JobSpec
from hvdtrain.task import load_task_class
from hvdtrain.tools.bench.job import measure_steps, session_alone
from hvdtrain.tools.blocks import Recorder, bench_config, run_block
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.agreement import Workers

BATCH = 8
OPTIONS = (
    {"compression": "powersgd:2", "warmup_steps": 5},
    {"compression": "bf16"},
    {"sync_every": 4, "outer_optimizer": "nesterov"},
)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=["powersgd", "bf16", "local"])


def job(**options) -> JobSpec:
    fields = config(batch_size=BATCH, learning_rate=0.01, **options)
    return JobSpec(fields, load_task_class("digits"), "", {})


@each_option
def test_steps_are_measured(started, options):
    measured = job(**options)
    task_data = open_task_data(measured)
    model = build_together(measured.config, task_data.task, started)
    run = TrainingRun(measured, started, task_data, model)
    found = measure_steps(run, seconds=0.05, splits=True)
    count = 5 * (12 if "sync_every" in options else 10)  # five blocks of whole synchronisations
    assert found["steps_timed"] == count
    assert 2.0 < found["first_loss"] < 2.6  # of ten classes
    assert found["part_seconds"]["compute"]["low"] > 0
    lowest = BATCH * started.workers.size / found["mean_step_seconds"]["high"]
    assert lowest == pytest.approx(found["samples_per_second"]["low"])


@each_option
def test_a_worker_alone_takes_the_same_steps(started, options):
    measured = job(**options)
    fields, task_data = bench_config(measured.config), replace(open_task_data(measured), eval_data=None)
    of_job = Workers("h1", local_rank=1, local_size=2)
    of_job.rank, of_job.size, of_job.controller = 1, 2, "Gloo"
    second = SimpleNamespace(workers=of_job, info=started.info)
    plan = TrainingPlan.of(fields, 2, len(task_data.train_data))
    recorder = Recorder()
    with readers_for(fields, task_data.train_data, None) as readers:
        run = TrainingRun(replace(measured, config=fields), second, task_data, None)
        session = session_alone(run, plan, readers)
        session.services.report = recorder
        seconds, waited = run_block(session, recorder, 6)
    assert session.backend.workers.size == 1
    assert session.plan().batch.global_batch == BATCH
    assert len(seconds) == (2 if "sync_every" in options else 6)  # local steps are timed together
    assert all(one > 0 for one in seconds)
    assert 0 <= waited < 10
    assert 2.0 < recorder.first_loss < 2.6
