"""The dry run before the first step: when it comes, what it leaves alone, how findings are shared."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from support import numpy_backend
from support.fakes import FakeBackend, make_loop_session, on_every_rank, one_worker
from support.numpy_backend import NumpyDigits
from support.states import contents

from hvdtrain.backends.records import DryRun
from hvdtrain.config import Layer
from hvdtrain.errors import DataError, NonFiniteLossError, TaskError
from hvdtrain.jobs.opening.dry_run import dry_run, share_findings
from hvdtrain.jobs.train import check_job, run_job
from hvdtrain.training_plan import Progress

FIELDS = {"framework": "numpy", "steps": 3, "batch_size": 16, "run_dir": "run"}


TASK = SimpleNamespace(loss="cross_entropy")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hvdtrain.host.environment.prepare", dict)
    numpy_backend.install(monkeypatch)
    return tmp_path


def layers(**fields) -> list[Layer]:
    return [Layer("test", {"task": "digits", **FIELDS, **fields})]


@pytest.mark.parametrize("start", [run_job, check_job])
def test_what_is_found_ends_the_job_before_anything_is_written(here, start):
    model = numpy_backend.Mlp(inputs=64, hidden=48, outputs=4)
    task = type("FewOutputs", (NumpyDigits,), {"numpy_model": lambda self: model})
    with pytest.raises(DataError, match="targets of the training data reach 9, and the model has 4 outputs"):
        start(layers(), task)
    assert list(here.iterdir()) == []


def test_a_check_says_what_it_found_and_writes_or_changes_nothing(here, capsys):
    check_job(layers(), NumpyDigits)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  model       3,610 parameters in 4 tensors"
    assert lines[2] == "  training    inputs float32 (16, 8, 8, 1), targets int64 (16,)"
    assert "the warm-up of 1 epoch is longer than the training" in lines[-1]
    assert list(here.iterdir()) == []
    run_job(layers(), NumpyDigits)
    before = contents(here)
    check_job(layers(resume="auto"), NumpyDigits)
    check_job(layers(), NumpyDigits)
    assert contents(here) == before


class Samples:
    """Draws its values from the global generators."""

    def __init__(self):
        self.read: list[int] = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(index)
        return {"inputs": np.asarray([np.random.rand(), random.random()]), "targets": 0}


def session_of(tmp_path, workers=None, result=None, **fields):
    backend = FakeBackend(workers or one_worker())
    calls = []

    def compute(batch, training):
        calls.append((batch.step, batch.indices.tolist(), training))
        return result(training) if result else DryRun(None, {})

    backend.dry_run = compute
    return make_loop_session(tmp_path, backend, **fields), calls


def test_the_batches_are_the_first_ones_from_where_training_stands(tmp_path):
    session, calls = session_of(tmp_path, eval_size=6, train_size=40)
    session.state.progress = Progress(3, 12)
    dry_run(session, TASK)
    with session.data.train_feed(session.plan(), session.state.progress) as feed:
        first = next(iter(feed))
    evaluated = [(step, [[0, 1, 2, 3]], False) for step in (0, 1)]  # twice, which must not differ
    assert calls == [(3, first.indices.tolist(), True), *evaluated]


def test_pythons_and_numpys_generators_are_as_before(tmp_path):
    session, _ = session_of(tmp_path)
    session.data.training = Samples()
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand()
    dry_run(session, TASK)
    assert session.data.training.read
    assert (random.random(), np.random.rand()) == expected


def test_what_one_worker_finds_every_worker_raises_with_its_rank():
    def work(workers):
        error = NonFiniteLossError("the loss is nan", "Look.") if workers.rank == 1 else None
        try:
            return share_findings(workers, error, {})
        except NonFiniteLossError as raised:
            return raised.problem, raised.remedy, raised.everywhere

    assert on_every_rank(["a", "b", "c"], work) == 3 * [("the loss is nan (found on rank 1)", "Look.", True)]


def test_a_worker_whose_model_fails_raises_without_waiting_for_the_others(tmp_path):
    """The others may wait in a collective of the model."""

    def work(workers):
        if workers.rank == 0:
            return None
        session, _ = session_of(tmp_path, workers, lambda _: DryRun(None, {}, "", ValueError("no")))
        with pytest.raises(TaskError, match="the first batch of the training data fails: ValueError: no"):
            dry_run(session, TASK)
        return len(workers.sent)

    assert on_every_rank(["a", "b"], work) == [None, 0]


def test_what_one_worker_refuses_ends_the_looks_of_all(tmp_path):
    """What follows on the others may have collectives."""

    def work(workers):
        refusal = TaskError("the model changes its shape") if workers.rank else None
        found = DryRun(None, {}, refusal=refusal)
        session, calls = session_of(tmp_path, workers, lambda _: found, eval_size=6)
        with pytest.raises(TaskError, match=r"changes its shape \(found on rank 1\)"):
            dry_run(session, TASK)
        return len(calls)

    assert on_every_rank(["a", "b"], work) == [1, 1]
