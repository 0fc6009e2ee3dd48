"""Learning rate, cadence and scaling: pure functions of progress."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers

from hvdtrain.schedule import Cadence, LearningRate

RATE = LearningRate(0.8, "constant", 10.0, 2.0, 0.25, (4.0, 8.0), step_factor=0.5, cycle_epochs=4.0)


@pytest.mark.parametrize(
    ("schedule", "epoch", "share"),
    [
        ("constant", 10.0, 1.0),
        ("step", 3.999, 1.0),
        ("step", 4.0, 0.5),
        ("step", 8.0, 0.25),
        ("inverse_sqrt", 8.0, 0.5),
        ("cyclic", 3.0, 0.25 + 0.75 * 0.5),
        ("cyclic", 4.0, 0.25),
        *((schedule, 2.0, 1.0) for schedule in ("cosine", "cosine_restarts", "linear", "plateau")),
    ],
)
def test_schedule_goes_through_its_points_after_a_linear_warm_up(schedule, epoch, share):
    rates = [replace(RATE, schedule=schedule).at(at) for at in (0.0, 0.5, 2.0, epoch)]
    assert rates == pytest.approx([0.0, 0.2, 0.8, 0.8 * share])


def of_pytorch(make, steps):
    """Give the learning rates that a scheduler of PyTorch sets, from before its first step on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("linear", partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=20)),
        ("cosine", partial(schedulers.CosineAnnealingLR, T_max=20, eta_min=0.08)),
        ("cosine_restarts", partial(schedulers.CosineAnnealingWarmRestarts, T_0=8, eta_min=0.08)),
    ],
)
def test_schedules_are_those_of_pytorch(schedule, make):
    rate = LearningRate(peak=0.8, schedule=schedule, total_epochs=5.0, final_fraction=0.1, cycle_epochs=2.0)
    assert [rate.at(step / 4) for step in range(21)] == pytest.approx(of_pytorch(make, 21))


def test_a_tasks_schedule_is_its_factor_in_the_warm_up_too():
    rate = replace(RATE, schedule="task", factor=lambda at: 0.5 if at.fraction < 0.5 else at.epoch)
    assert [rate.at(epoch) for epoch in (1.0, 4.0, 6.0)] == pytest.approx([0.8 / 2 / 2, 0.8 / 2, 0.8 * 6])


def test_one_cycle_is_that_of_pytorch():
    """PyTorch reaches the peak and the end a step early, so that its last step has the last rate."""
    steps, rise = 50, 0.3
    top, last = rise * steps - 1, steps - 1
    parts = np.interp(range(steps), [0, top, last], [0, rise, 1])
    rate = LearningRate(peak=0.8, schedule="one_cycle", total_epochs=5.0)
    make = partial(schedulers.OneCycleLR, max_lr=0.8, total_steps=steps, cycle_momentum=False)
    expected = [*of_pytorch(make, steps - 1), 0.8 / 25e4]
    assert [rate.at(5.0 * part) for part in parts] == pytest.approx(expected)
    assert rate.at(6.0) == rate.at(5.0)


def test_cadence_reads_and_refuses_what_is_no_interval():
    assert Cadence.parse(10) == Cadence(10, "steps")
    assert Cadence.parse("0.5 epoch") == Cadence(0.5, "epochs")
    for given_value in ("often", "1.5", -1, "-1epoch", "nanepoch", None, True):
        with pytest.raises(ValueError, match=r"must be a number of steps such as 10, or epochs such as"):
            Cadence.parse(given_value)


@pytest.mark.parametrize(
    ("every", "batch", "data_size", "expected"),
    [
        ("3", 4, 10, [3, 6, 9]),
        ("1epoch", 4, 10, [3, 5, 8, 10]),  # boundaries at samples 10, 20, 30, 40
        ("0.5epoch", 4, 10, [2, 3, 4, 5, 7, 8, 9, 10]),  # at 5, 10, 15, ...
        ("0.5epoch", 1, 3, [2, 3, 5, 6, 8, 9]),  # at 1.5, 3, 4.5, ...
        ("0.3epoch", 1, 10, [3, 6, 9]),
        ("0.1epoch", 40, 10, list(range(1, 11))),  # several boundaries in one step are due once
    ],
)
def test_cadence_is_due_at_the_first_step_at_or_past_each_boundary(every, batch, data_size, expected):
    is_due = Cadence.parse(every).due
    assert [n for n in range(1, 11) if is_due(n, (n - 1) * batch, n * batch, data_size)] == expected


@given(st.integers(1, 500), st.integers(1, 10**12), st.integers(1, 10**6), st.integers(1, 10**6))
def test_every_boundary_is_due_once_and_never_early(hundredths, data_size, batch, boundary):
    cadence = Cadence.parse(f"{hundredths // 100}.{hundredths % 100:02d}epoch")
    interval = Fraction(hundredths, 100) * data_size
    at = boundary * interval
    step = math.ceil(at / batch)  # the first at or past it
    before_last = (step - 1) * batch // interval > (step - 2) * batch // interval
    assert cadence.due(step, (step - 1) * batch, step * batch, data_size)
    assert cadence.due(step - 1, (step - 2) * batch, (step - 1) * batch, data_size) == before_last
