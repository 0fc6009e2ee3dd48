"""The schedule plateau: the policy by itself, and the loop that follows it."""

import pytest
from support.fakes import FakeBackend, make_loop_session, one_worker
from support.twins import torch

from hvdtrain.early_stopping import MetricGoal, PlateauState
from hvdtrain.loop import run
from hvdtrain.schedule import LearningRate

LOSS, ACCURACY = MetricGoal.parse("loss"), MetricGoal.parse("accuracy")
PEAK = 0.1


def fractions(values, patience, factor, lowest, goal=LOSS):
    """Give the fraction of the peak after each evaluation."""
    state, found = PlateauState(metric=str(goal)), []
    for number, value in enumerate(values):
        state = state.update(goal, value, 10 * (number + 1))
        if state.is_due(patience, lowest):
            state = state.lowered(factor, lowest)
        found.append(state.fraction)
    return found


@pytest.mark.parametrize(
    ("values", "patience", "lowest"),
    [
        ([1.0, 0.9, 0.9, 0.95, 0.8, 0.7, 0.71, 0.72, 0.73, 0.74, 0.75], 2, 0.0),
        ([1.0, 2.0, 1.5, 1.2, 1.1, 0.99, 1.0, 1.0, 1.0], 3, 0.2),
    ],
)
def test_it_lowers_as_pytorch_does(values, patience, lowest):
    """PyTorch's patience counts evaluations that are let pass: it is one less."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=patience - 1, factor=0.3, threshold=0.0, min_lr=lowest, eps=0.0
    )
    expected = []
    for value in values:
        theirs.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert fractions(values, patience, 0.3, lowest) == pytest.approx(expected, rel=1e-12)


def test_warm_up_and_floor_hold():
    rate = LearningRate(PEAK, "plateau", total_epochs=4, warmup_epochs=1, final_fraction=0.2)
    assert rate.at(0.5) == pytest.approx(PEAK / 2)
    assert rate.at(2.0) == PEAK
    assert rate.at(2.0, 0.5) == PEAK / 2
    assert rate.at(2.0, 0.1) == pytest.approx(PEAK * 0.2)
    assert LearningRate(PEAK, "constant", 4).at(2.0, 0.5) == PEAK


LOWERED = PlateauState(metric="loss:min", fraction=0.1, best=3.0, evaluations=1)


@pytest.mark.parametrize(
    ("goal", "before", "expected"),
    [
        (None, LOWERED, None),
        (LOSS, None, PlateauState(metric="loss:min")),
        (LOSS, LOWERED, LOWERED),
        (ACCURACY, LOWERED, PlateauState(metric="accuracy:max", fraction=0.1)),
    ],
)
def test_a_resumed_run_keeps_its_rate_and_counts_on_for_the_same_metric(goal, before, expected):
    assert PlateauState.continued(goal, before) == expected


def test_the_step_after_the_evaluation_has_the_lower_rate_and_it_is_said(tmp_path):
    backend = FakeBackend(one_worker(), eval_losses=[0.5, 0.6, 0.4, 0.5, 0.5])
    options = {"lr_schedule": "plateau", "plateau_patience": 1, "plateau_factor": 0.5, "learning_rate": PEAK}
    options |= {"lr_scaling": "none", "save_every": None, "eval_every": 1, "eval_size": 7}
    session = make_loop_session(tmp_path, backend, **options)
    said = []
    session.services.report.say = said.append
    run(session)
    assert session.backend.rates == pytest.approx([PEAK, PEAK, PEAK / 2, PEAK / 2, PEAK / 4])
    assert len(said) == 2
    assert "0.1 -> 0.05 from step 3 on" in said[0]
    assert "0.05 -> 0.025 from step 5 on" in said[1]
