"""What follows from config, number of workers and size of the data."""

from operator import attrgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.config import Config
from hvdtrain.data.feed import Shard
from hvdtrain.errors import ConfigError
from hvdtrain.training_plan import Progress, TrainingPlan


def layout(workers: int = 4, data_size: int = 1437, **fields: object) -> TrainingPlan:
    return TrainingPlan.of(Config(**{"framework": "torch", "epochs": 2, **fields}), workers, data_size)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {"batch.global_batch": 128, "eval_batch.micro_batch": 32, "eval_batch.accumulate": 1}),
        # what the learning rate is quoted for
        ({"accumulate": 3}, {"base_batch": 96, "eval_batch.micro_batch": 32, "eval_batch.accumulate": 1}),
        ({"global_batch_size": 50}, {"base_batch": 50, "eval_batch.micro_batch": 13}),
        ({"global_batch_size": 50, "accumulate": 3, "base_batch_size": 256}, {"base_batch": 256}),
        ({"eval_batch_size": 100}, {"eval_batch.micro_batch": 100, "eval_batch.workers": 4}),
        # the peak grows with the workers
        ({"lr_scaling": "linear", "learning_rate": 0.5}, {"learning_rate.peak": 2.0}),
        ({"lr_scaling": "sqrt", "learning_rate": 0.5}, {"learning_rate.peak": 1.0}),
        ({"lr_scaling": "none", "learning_rate": 0.5}, {"learning_rate.peak": 0.5}),
        # where training ends
        ({"epochs": 0.5}, {"last_sample": 718, "steps": 6}),
        ({"epochs": 1e-9}, {"last_sample": 1, "steps": 1}),
        ({"epochs": None, "steps": 7}, {"last_sample": 7 * 128, "steps": 7}),
    ],
)
def test_what_follows_from_the_config(fields, found):
    plan = layout(**fields)
    assert {name: attrgetter(name)(plan) for name in found} == found


@given(st.integers(1, 9), st.integers(1, 5000), st.integers(1, 5), st.integers(1, 64), st.integers(1, 3))
def test_every_step_moves_on_and_the_last_ends_exactly(workers, data_size, epochs, batch_size, accumulate):
    found = layout(workers, data_size, epochs=epochs, batch_size=batch_size, accumulate=accumulate)
    samples = 0
    for _ in range(found.steps):
        assert samples < found.last_sample
        samples = found.samples_after(samples)
    assert samples == found.last_sample == epochs * data_size


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 200), st.integers(1, 4))
@example(data_size=1797, batch_size=32, steps=31, workers=1)
def test_as_many_steps_are_in_a_warm_up_in_steps(data_size, batch_size, steps, workers):
    plan = layout(workers, data_size, warmup_steps=steps, batch_size=batch_size)
    size = plan.batch.global_batch
    shard = Shard(plan.batch, 0, 0, 0, (steps + 5) * size, warmup_samples=plan.warmup_samples)
    found = [plan.in_warmup(n, n * size) for n in range(steps + 5)]
    assert found == [n < steps for n in range(steps + 5)]
    assert [shard.begins_in_warmup(n) for n in range(steps + 5)] == found


def elastic(workers: int, most: int = 8, **fields: object) -> TrainingPlan:
    """Give the layout of an elastic job while it has this many workers."""
    return TrainingPlan.of(Config(**{"framework": "torch", "epochs": 2, **fields}), workers, 1000, most=most)


@pytest.mark.parametrize("fields", [{"global_batch_size": 50}, {"batch_size": 7}, {"eval_batch_size": 9}])
def test_batches_of_an_elastic_job_have_one_shape_at_any_number_of_workers(fields):
    plans = [elastic(workers, **fields) for workers in range(1, 9)]
    assert len({plan.batch.micro_batch for plan in plans}) == 1
    assert len({(plan.eval_batch.micro_batch, plan.eval_batch.accumulate) for plan in plans}) == 1
    for workers, accumulate, passes in ((8, 1, 1), (3, 1, 3), (1, 1, 8), (3, 2, 6)):
        batch = elastic(workers, global_batch_size=64, accumulate=accumulate).batch
        assert (batch.global_batch, batch.micro_batch, batch.accumulate) == (64, 8 // accumulate, passes)


@pytest.mark.parametrize(
    ("plan", "least", "remedy"), [(elastic, 16, "a lower --max-np"), (layout, 8, "fewer")]
)
def test_a_batch_that_is_too_small_for_the_most_workers_is_refused(plan, least, remedy):
    assert plan(4, global_batch_size=least, accumulate=2).batch.micro_batch == 1
    with pytest.raises(ConfigError, match=rf"smaller than .* x 2;.*\nUse .* at least {least}, or {remedy}"):
        plan(4, global_batch_size=least - 1, accumulate=2)


def going_on(step: int, samples: int, **fields: object) -> TrainingPlan:
    """Give the layout of one worker over 100 samples that goes on from there."""
    return TrainingPlan.of(Config(framework="torch", **fields), 1, 100, Progress(step, samples))


@pytest.mark.parametrize(
    ("progress", "batch_size", "last_sample", "steps"),
    [((0, 0), 10, 60, 6), ((4, 40), 20, 80, 6), ((4, 40), 7, 54, 6), ((9, 90), 10, 90, 9)],
)
def test_steps_end_at_the_same_step_whatever_the_batch_was(progress, batch_size, last_sample, steps):
    found = going_on(*progress, batch_size=batch_size, steps=6)
    assert (found.last_sample, found.steps) == (last_sample, steps)


@given(st.integers(0, 500), st.integers(0, 50), st.integers(1, 64), st.integers(1, 5))
def test_a_run_that_goes_on_ends_exactly_where_it_should(before, step, batch_size, epochs):
    found = going_on(step, before, batch_size=batch_size, epochs=epochs)
    samples, count = before, step
    while samples < found.last_sample:
        samples, count = found.samples_after(samples), count + 1
    assert count == found.steps
    assert samples == max(before, epochs * 100)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "one_cycle"])
def test_steps_with_few_samples_have_the_learning_rates_of_full_ones(schedule):
    warmup = {} if schedule == "one_cycle" else {"warmup_steps": 4}
    config = Config(framework="torch", steps=20, batch_size=10, lr_schedule=schedule, **warmup)
    full = TrainingPlan.of(config, 1, 100)
    begun = TrainingPlan.of(config, 1, 100, is_dealt=True)
    for progress in (Progress(3, 21), Progress(12, 80)):
        resumed = TrainingPlan.of(config, 1, 100, progress, is_dealt=True)
        for step in range(progress.step, 20):
            at = Progress(step, progress.samples + 7 * (step - progress.step))
            expected = full.learning_rate_at(Progress(step, 10 * step))
            assert resumed.learning_rate_at(at) == begun.learning_rate_at(at) == expected
            assert resumed.in_warmup(at.step, at.samples) == full.in_warmup(step, 10 * step)
        assert not resumed.is_done(Progress(19, 140))
        assert resumed.is_done(Progress(20, 147))
