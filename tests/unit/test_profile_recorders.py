"""What records steps: Horovod's timeline, and what PyTorch's profiler recorded."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.backends.torch.step_clock import operations_in
from hvdtrain.config import Config
from hvdtrain.jobs.train import run_job

TIMELINE = "HOROVOD_TIMELINE"


def test_what_pytorch_records_becomes_spans_by_the_clock_of_the_host():
    profiler = torch.profiler.profile()
    begin_ns = time.time_ns()
    profiler.start()
    with torch.profiler.record_function("mine"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.stop()
    found = operations_in(profiler.profiler.kineto_results.events())
    kinds = {span.name: span.kind for span in found.spans}
    assert (kinds["aten::mm"], kinds["mine"]) == ("operation", "runtime")
    assert len(found.threads) == 1
    assert all(begin_ns - 1e8 < span.begin_ns <= span.end_ns < time.time_ns() + 1e8 for span in found.spans)
    assert [span.begin_ns for span in found.spans] == sorted(span.begin_ns for span in found.spans)


@pytest.mark.parametrize(("window", "seen"), [("2-3", "DYNAMIC"), (None, None)])
def test_training_starts_horovod_with_a_timeline_if_steps_are_to_be_recorded(monkeypatch, window, seen):
    found = []

    def start(*job, **options):
        found.append(os.environ.get(TIMELINE))
        raise RuntimeError("enough")

    monkeypatch.delenv(TIMELINE, raising=False)
    job = SimpleNamespace(config=Config(framework="torch", profile=window))
    monkeypatch.setattr("hvdtrain.jobs.train.prepare", lambda layers, task_class: job)
    monkeypatch.setattr("hvdtrain.jobs.train.started", start)
    with pytest.raises(RuntimeError, match="enough"):
        run_job([])
    assert found == [seen]
    assert TIMELINE not in os.environ
