"""A run that continues from a manifest does what the uninterrupted one would have done."""

import json

import pytest
from support.fakes import asks, make_loop_session

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.loop import run
from hvdtrain.session import RunState, Session


@pytest.fixture
def resume(tmp_path):
    """Open a session that continues from a manifest, read as it lies on the disk."""

    def open_session(manifest: Manifest, eval_size: int = 0, backend=None, **fields) -> Session:
        session = make_loop_session(tmp_path, backend, eval_size, **fields)
        read = Manifest.model_validate(json.loads(manifest.model_dump_json()))
        session.state = RunState.from_manifest(read, session.config)
        return session

    return open_session


def stopped_at(tmp_path, step: int, **fields) -> Session:
    """Train to that step; where all are saved, all are read, and a request is met at its own step."""
    session = make_loop_session(tmp_path, save_every=1, **fields)
    run(session, asks({step: ControlFlags(stop=True)}, session.backend))
    assert (session.state.progress.step, session.stopped) == (step, True)
    return session


@pytest.mark.parametrize(
    "fields",
    [{"log_every": 2, "lr_schedule": "cosine", "warmup_epochs": 0.5}, {"eval_size": 7, "eval_every": 2}],
)
@pytest.mark.parametrize("step", [2, 4])
def test_windows_evaluations_and_rates_are_those_of_the_uninterrupted_run(tmp_path, resume, fields, step):
    whole = make_loop_session(tmp_path, **fields)
    run(whole)
    first = stopped_at(tmp_path, step, **fields)
    second = resume(first.services.saver.manifests[-1], **fields)
    run(second)
    one, other, expected = (session.services.report for session in (first, second, whole))
    assert one.windows + other.windows == expected.windows
    assert one.evaluations + other.evaluations == expected.evaluations
    assert one.steps + other.steps == expected.steps
    assert first.backend.rates + second.backend.rates == whole.backend.rates
    assert (second.state.progress, second.state.last_eval) == (whole.state.progress, whole.state.last_eval)


def finished(tmp_path, **fields) -> Manifest:
    session = make_loop_session(tmp_path, **fields)
    run(session)
    return session.services.saver.manifests[-1]


def test_a_finished_run_that_was_evaluated_has_nothing_left_to_do_but_can_be_made_longer(tmp_path, resume):
    session = resume(finished(tmp_path), epochs=None, steps=8)
    run(session)
    assert session.services.report.steps == [6, 7, 8]
    session = resume(finished(tmp_path, eval_size=7), eval_size=7)
    run(session)
    assert session.services.report.steps == session.services.report.evaluations == []
    assert session.services.saver.steps == []
    assert session.state.last_eval == {"loss": 3.0}
    assert session.stopped is False


def test_an_evaluation_that_was_left_over_is_judged_and_saved(tmp_path, resume):
    session = resume(finished(tmp_path), eval_size=7, keep_best="loss:min", early_stopping="loss:min")
    run(session)
    assert session.state.best_value == 3.0
    assert session.state.early_stopping.best == 3.0
    assert [manifest.metrics for manifest in session.services.saver.manifests] == [{"loss": 3.0}]
    assert session.services.saver.steps == [5]
    assert session.services.report.steps == []


@pytest.mark.parametrize(
    ("fields", "steps", "samples"),
    [
        ({"batch_size": 2}, [3, 4, 5, 6, 7, 8], 20),
        ({"batch_size": 2, "epochs": None, "steps": 5}, [3, 4, 5], 8 + 3 * 2),
        ({"global_batch_size": 6}, [3, 4], 20),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_batch_from_the_same_sample(tmp_path, resume, fields, steps, samples):
    manifest = stopped_at(tmp_path, 2).services.saver.manifests[-1]
    session = resume(manifest, **fields)
    run(session)
    assert (session.services.report.steps, session.state.progress.samples) == (steps, samples)


def test_the_samples_left_are_trained_on_exactly_once(tmp_path, resume):
    """Over a stop and another batch size: two epochs are every sample twice."""
    manifest = stopped_at(tmp_path, 3, trace_indices=True).services.saver.manifests[-1]
    run(resume(manifest, batch_size=3, trace_indices=True))
    lines = (tmp_path / "indices" / "rank-0000.jsonl").read_text().splitlines()
    assert sorted(i for line in lines for i in json.loads(line)["indices"]) == sorted([*range(10)] * 2)
