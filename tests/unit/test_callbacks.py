"""Callbacks: which are taken, when they are called, and what an exception in one does."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.watching import MEANS, METRICS, Watched, records, run_context, step_info, summary

from hvdtrain.callbacks import HOOKS, Callback, find_callbacks
from hvdtrain.errors import PeerLostError, TaskError, WorkerFailure
from hvdtrain.reporting.report import Report
from hvdtrain.workers.activity import ACTIVITY, TRAINING

RATES = {"learning_rate": 0.03125, "samples_per_second": 2000.0}


class Notebook:
    """A callback of no class of hvdtrain's, which remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        for name in HOOKS:
            setattr(self, name, lambda *args, name=name: self.calls.append((name, *args)))

    @property
    def hooks(self) -> list[str]:
        return [call[0] for call in self.calls]


class Failing(Callback):
    """A callback that fails in one hook, and remembers the hooks that were called."""

    def __init__(self, hook: str, error: Exception | None = None) -> None:
        self.hook, self.error = hook, error or ValueError("boom")
        self.called: list[str] = []
        for name in ("on_start", "on_evaluation", "on_end"):
            setattr(self, name, lambda *_, name=name: self._call(name))

    def _call(self, hook: str) -> None:
        self.called.append(hook)
        if hook == self.hook:
            raise self.error


def told_everything(report) -> None:
    """Tell a report of a short run."""
    report.on_start(20, 4)
    report.on_step(step_info(5), METRICS)
    report.on_window(step_info(5), MEANS, 2000.0, {"data_wait_fraction": 0.25})
    report.on_evaluation(step_info(5), MEANS, 2000.0)
    report.on_checkpoint(5, Path("step-00000005"))
    report.on_workers_changed(0, 3)
    report.on_end(summary())


@pytest.fixture
def watched(tmp_path):
    """Makes a report with callbacks on a console that a test can read."""
    with ExitStack() as stack:

        def make(*callbacks, **fields) -> Report:
            report = Watched(tmp_path, callbacks=callbacks, **fields).report
            stack.callback(report.close)
            return report

        yield make


def test_every_hook_is_called_with_what_it_promises(watched, tmp_path):
    notebook, model = Notebook(), object()
    told_everything(watched(notebook, model=model))
    (_, context), *calls = notebook.calls
    assert calls == [
        ("on_step", step_info(5), METRICS),
        ("on_window", step_info(5), {**MEANS, **RATES, "data_wait_fraction": 0.25}),
        ("on_evaluation", step_info(5), {**MEANS, **RATES}),
        ("on_checkpoint", 5, Path("step-00000005")),
        ("on_workers_changed", context),
        ("on_end", summary()),
    ]
    assert context.model is model
    assert (context.rank, context.workers, context.steps, context.steps_done) == (0, 3, 20, 4)


def test_the_context_of_a_callback_follows_its_worker_to_another_rank(tmp_path):
    """It becomes rank 0: what it kept of the start then shows and writes."""
    first, second = Notebook(), Notebook()
    before = Report(replace(run_context(tmp_path), rank=1), [first])
    before.on_start(20, 4)
    after = Report(replace(run_context(tmp_path), rank=0, workers=1), [first, second])
    after.go_on_from(before, steps=30, done=9)
    after.on_workers_changed(0, 1)
    assert (first.hooks, second.hooks) == (["on_start", "on_workers_changed"],) * 2
    (_, kept), (_, given) = first.calls
    assert kept is given
    assert (kept.rank, kept.workers, kept.steps, kept.steps_done) == (0, 1, 30, 4)
    assert kept.log.__self__ is after


def test_a_callback_whose_end_came_gets_no_second_one_on_another_rank(tmp_path):
    """Rank 0 is lost after the others have ended: the new one writes the summary, and ends its own."""
    of_every_rank, of_rank_zero = Notebook(), Notebook()
    before = Report(replace(run_context(tmp_path), rank=1), [of_every_rank])
    before.on_start(20, 4)
    before.on_end(summary())
    after = Report(run_context(tmp_path), [of_every_rank, of_rank_zero])
    after.go_on_from(before, steps=20, done=20)
    after.on_end(summary())
    assert of_every_rank.hooks == of_rank_zero.hooks == ["on_start", "on_end"]


def test_an_on_start_whose_collective_failed_is_called_again_and_no_other(tmp_path):
    first, failing, last = Notebook(), Failing("on_start", PeerLostError("a worker was lost")), Notebook()
    report = Report(run_context(tmp_path), [first, failing, last])
    with pytest.raises(PeerLostError):
        report.on_start(20, 4)
    failing.hook = ""
    report.on_start(20, 4)
    report.on_evaluation(step_info(5), MEANS, 2000.0)
    assert first.hooks == last.hooks == ["on_start", "on_evaluation"]
    assert failing.called == ["on_start", "on_start", "on_evaluation"]


def test_a_callback_cannot_replace_what_each_line_says_of_its_step(watched, tmp_path):
    kept = []
    watched(SimpleNamespace(on_start=kept.append)).on_start(20, 0)
    with pytest.raises(ValueError, match=r"log\(\): seconds, step are names that every line"):
        kept[0].log(step_info(6), {"step": 7, "seconds": 1, "mine": 3})
    assert records(tmp_path) == []


def test_a_callback_that_fails_ends_the_job_with_its_name_and_is_told_of_the_end(watched):
    failing, notebook = Failing("on_evaluation"), Notebook()
    report = watched(failing, notebook)
    with pytest.raises(WorkerFailure) as raised:
        told_everything(report)
    assert raised.value.problem.startswith(f"callback Failing failed in on_evaluation: {__file__}, line ")
    assert isinstance(raised.value.__cause__, ValueError)
    report.on_end(summary(status="failed"))
    assert failing.called == ["on_start", "on_evaluation", "on_end"]
    assert notebook.hooks == ["on_start", "on_step", "on_window", "on_end"]


def test_a_task_gives_callbacks_as_an_attribute_or_a_method_and_misspelled_hooks_are_refused():
    mine, given = Notebook(), Notebook()
    for callbacks in ([mine], lambda: (mine,)):
        task = SimpleNamespace(callbacks=callbacks)
        assert find_callbacks(task, "my.py:Task", [given]) == [mine, given]
    for task in (object(), SimpleNamespace(callbacks=None)):
        assert find_callbacks(task, "my.py:Task") == []
    callback = type("Mine", (), {"on_end": lambda self, summary: None, "on_steps": lambda self, *_: None})()
    with pytest.raises(TaskError, match=r"callback Mine has a method on_steps, .*\nDid you mean on_step\?"):
        find_callbacks(SimpleNamespace(callbacks=[callback]), "my.py:Task")


def test_the_watch_of_the_workers_sees_a_users_callback_as_long_work(watched):
    seen = []

    class Uploads:
        def on_checkpoint(self, step, path):
            seen.append(ACTIVITY.current)

    report = watched(Uploads())
    report.on_start(20, 4)
    ACTIVITY.enter(TRAINING, 7)
    report.on_checkpoint(5, Path("step-00000005"))
    (activity,) = seen
    assert (str(activity), activity.is_long) == ("in on_checkpoint of Uploads after step 7", True)
    assert str(ACTIVITY.current) == "in training step 7"
