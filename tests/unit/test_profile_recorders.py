"""What records steps: Horovod's timeline, and reading what PyTorch's profiler wrote."""

import json
import os
from types import SimpleNamespace

import pytest

from hvdtrain.backends.recording import Operation
from hvdtrain.backends.torch.step_clock import operations_in
from hvdtrain.config import Config
from hvdtrain.jobs.train import run_job

TIMELINE = "HOROVOD_TIMELINE"


def test_a_trace_of_pytorch_becomes_spans():
    track = {"pid": 7, "tid": 8}
    events = [
        {"ph": "M", "name": "thread_name", **track, "ts": 0, "args": {"name": "main"}},
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 3, "ts": 4.0, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **track, "ts": 1.5, "dur": 2.25, "args": {"Ev": 3}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **track, "ts": 0, "dur": 9},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, **track, "ts": 1.5},
        {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step", **track, "ts": 3},
    ]
    found = operations_in(json.dumps({"baseTimeNanoseconds": 1000, "traceEvents": events}))
    assert found.threads == ["3", "main"]
    assert found.spans == [
        Operation(1, "aten::mm", 2500, 4750, "operation"),
        Operation(1, "Optimizer.step", 4000, 4000, "runtime"),
        Operation(0, "gemm", 5000, 7000, "kernel"),
    ]


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
