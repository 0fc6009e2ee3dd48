"""The learning rates of a task's own optimizer, and which of them and the config's a job trains with."""

from types import SimpleNamespace

import horovod.torch as hvd
import pytest
from support.twins import keras, torch

from hvdtrain.backends.optimizers import check_own_optimizer
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.tensorflow.steps import optimizers as of_keras
from hvdtrain.backends.torch.steps import optimizers as of_torch
from hvdtrain.config import LEARNING_RATES, Config
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.jobs.opening.limits import learning_rate_of

BODY, HEAD = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))


class Lion(torch.optim.SGD):
    """As third parties write them: the learning rate is required."""

    def __init__(self, params, lr):
        super().__init__(params, lr)


def of_groups(*options: dict, **fields: float) -> tuple[OwnRates, list[float]]:
    """Give the rates of AdamW with such groups, and the lr_scale of each group from then on."""
    groups = [{"params": [p], **given} for p, given in zip((BODY, HEAD), options, strict=True)]
    optimizer = torch.optim.AdamW(groups, **fields)
    return of_torch.take_own_rates(optimizer), [g.get("lr_scale", 1.0) for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("options", "fields", "base", "is_default", "factors"),
    [
        (({}, {}), {}, 1e-3, True, [1.0, 1.0]),
        (({}, {}), {"lr": 0.02}, 0.02, False, [1.0, 1.0]),
        (({"lr": 1e-4}, {"lr": 1e-3}), {}, 1e-3, False, [0.1, 1.0]),
        (({"lr": 0.03}, {}), {}, 0.03, False, [1.0, 1e-3 / 0.03]),
        (({"lr": 5e-4, "lr_scale": 0.5}, {}), {}, 1e-3, False, [0.25, 1.0]),
    ],
)
def test_the_largest_rate_is_the_base_and_groups_keep_their_ratio(options, fields, base, is_default, factors):
    own, scales = of_groups(*options, **fields)
    assert (own.optimizer, own.base, own.is_default) == ("AdamW", base, is_default)
    assert list(own.factors) == scales == pytest.approx(factors)


def test_a_required_rate_counts_as_set_and_the_optimizer_stays_the_object_that_it_is():
    optimizer = Lion([BODY], 0.3)
    task = SimpleNamespace(torch_optimizer=lambda parameters: optimizer)
    found = of_torch.choose_optimizer(task, Config(framework="torch"), SimpleNamespace(entries=[]), {})
    assert found is optimizer
    assert of_torch.take_own_rates(optimizer) == OwnRates("Lion", 0.3, is_default=False)


def test_rates_of_zero_and_schedules_are_refused():
    schedules = torch.optim.lr_scheduler
    with pytest.raises(TaskError, match="has the learning rate 0"):
        of_groups({}, {}, lr=0.0)
    with pytest.raises(TaskError, match="has the learning rate 0"):
        of_keras.take_own_rates(keras.optimizers.SGD(0.0))
    for rate in (keras.optimizers.schedules.CosineDecay(0.1, 100), lambda: 0.1):
        with pytest.raises(TaskError, match=r"has a schedule of its own .*\n.*lr_schedule"):
            of_keras.take_own_rates(keras.optimizers.SGD(rate))
    for make in (lambda o: schedules.StepLR(o, 3), lambda o: schedules.OneCycleLR(o, 1.0, 9)):
        optimizer = torch.optim.SGD([BODY], lr=0.1)
        scheduler = make(optimizer)
        task = SimpleNamespace(torch_optimizer=lambda parameters, found=scheduler: found)
        with pytest.raises(TaskError, match=r"has a schedule of its own .*\n.*lr_schedule"):
            of_torch.take_own_rates(optimizer)
        with pytest.raises(TaskError, match=r"must give an optimizer, found .*\n.*lr_schedule"):
            of_torch.choose_optimizer(task, Config(framework="torch"), SimpleNamespace(entries=[]), {})


def test_a_keras_optimizer_has_one_rate():
    lion = keras.optimizers.Lion(3e-4)
    assert of_keras.take_own_rates(keras.optimizers.AdamW()) == OwnRates("AdamW", 0.001, is_default=True)
    for one in (lion, keras.optimizers.LossScaleOptimizer(lion)):
        assert of_keras.take_own_rates(one) == OwnRates("Lion", 0.0003, is_default=False)


def test_the_config_goes_before_an_optimizers_default_and_of_two_different_rates_both_are_named():
    of_lion = OwnRates("Lion", 1e-3, is_default=False)
    for given, own, expected in (
        (None, None, LEARNING_RATES["sgd"]),
        (None, of_lion, 1e-3),
        (0.001000000047, of_lion, 0.001000000047),
        (0.02, OwnRates("AdamW", 1e-3, is_default=True), 0.02),
        (0.02, OwnRates("Adafactor", None, is_default=True), 0.02),
    ):
        assert learning_rate_of(Config(framework="torch", learning_rate=given), own) == expected
    groups = OwnRates("AdamW", 1e-3, is_default=False, factors=(0.1, 1.0))
    for own, said in ((of_lion, "Lion, has 0.001"), (groups, "AdamW, has groups with 0.0001 and 0.001")):
        with pytest.raises(ConfigError, match=f"learning_rate is 0.02, and .* {said}"):
            learning_rate_of(Config(framework="torch", learning_rate=0.02), own)


def test_optimizers_that_reduce_gradients_or_need_a_closure_are_refused():
    pytorch, of_keras_kind = torch.optim.Optimizer, keras.optimizers.Optimizer
    wrapped = type("SGD", (torch.optim.SGD,), {"__module__": hvd.DistributedOptimizer.__module__})
    of_another = type("DistributedOptimizer", (keras.optimizers.SGD,), {})
    for one, kind, problem in (
        (wrapped([BODY]), pytorch, "wrapped to reduce gradients"),
        (of_another(), of_keras_kind, "wrapped to reduce gradients"),
        (torch.optim.LBFGS([BODY]), pytorch, "LBFGS, whose step computes the loss several times"),
    ):
        with pytest.raises(TaskError, match=problem):
            check_own_optimizer(one, kind, "an_optimizer", "one")
