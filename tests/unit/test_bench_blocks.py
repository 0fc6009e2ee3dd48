"""Blocks of steps through the loop: what is timed, and what of it waits."""

from types import SimpleNamespace

import pytest
from support.fakes import FakeLocalBackend, make_loop_session, one_worker

from hvdtrain.backends.step_metrics import StepMetrics, StepStatistics
from hvdtrain.config import Config
from hvdtrain.jobs.opening.start import JobSpec
from hvdtrain.tools import blocks
from hvdtrain.tools.bench import job
from hvdtrain.tools.blocks import Recorder, bench_config, run_block

PAUSE = 0.02


class SlowSynchronizing(FakeLocalBackend):
    """Takes long to make the workers equal, and no time for a step."""

    def __init__(self, workers, now) -> None:
        super().__init__(workers)
        self.now = now

    def synchronize(self):
        self.now.seconds += PAUSE
        return super().synchronize()


def block(tmp_path, backend, steps, **fields):
    session = make_loop_session(tmp_path, backend, epochs=None, steps=10**6, **fields)
    session.services.report = Recorder()
    return session, run_block(session, session.services.report, steps)


@pytest.mark.parametrize("every", [2, 5])
def test_a_synchronisation_counts_in_the_steps_before_it(every, tmp_path, monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(blocks, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    session, (seconds, _) = block(tmp_path, SlowSynchronizing(one_worker(), now), 7, sync_every=every)
    assert seconds == pytest.approx(-(-7 // every) * [PAUSE / every])
    assert session.state.progress.step % every == 0  # the next block begins with equal workers


def test_local_steps_share_the_wait_of_all_of_them():
    recorder = Recorder()
    metrics = SimpleNamespace(mean=lambda _: 2.5, statistics=StepStatistics(0, 6.0))
    recorder.on_step(SimpleNamespace(steps=3), metrics)
    recorder.on_step(SimpleNamespace(steps=1), StepMetrics.from_vector(["loss"], (1.0, *11 * [0.0]), 1.0))
    assert recorder.wait_seconds == [2.0, 2.0, 2.0, 0.0]
    assert recorder.first_loss == 2.5


def config(**fields):
    return Config(framework="torch", **fields)


def test_low_rank_is_measured_as_it_is_after_the_warm_up():
    found = bench_config(config(compression="powersgd:4", warmup_epochs=2.0, learning_rate=0.1))
    assert (found.warmup_epochs, found.learning_rate) == (0.0, pytest.approx(1e-4))
    assert bench_config(config(compression="powersgd:4", warmup_steps=9)).warmup_steps is None
    assert bench_config(found) == found
    assert bench_config(config(compression="powersgd:4", learning_rate=0.1)).learning_rate == 0.1
    assert bench_config(config(warmup_epochs=2.0, learning_rate=0.1)).warmup_epochs == 2.0


def test_horovod_starts_without_its_timeline(monkeypatch):
    class StartedError(Exception):
        """Stands for a job that starts."""

    def started(job, _):
        seen.append(job)
        raise StartedError

    seen = []
    monkeypatch.setattr(job, "prepare", lambda *_: JobSpec(config(profile="3-5"), None, "", {}))
    monkeypatch.setattr(job, "started", started)
    with pytest.raises(StartedError):
        job.bench_job([], job.Request())
    assert seen[0].config.profile is None
    assert "profile is left out" in seen[0].notes[0]
