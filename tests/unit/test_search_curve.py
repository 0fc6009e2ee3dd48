"""The rate that rises, and what its losses suggest."""

import math
import random
from types import SimpleNamespace

import pytest

from hvdtrain.config import Config
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.tools.search import lr_find
from hvdtrain.tools.search.lr_find import (
    BatchScale,
    Curve,
    LearningRates,
    Rise,
    batch_scale,
    rising_config,
)
from hvdtrain.training_plan import TrainingPlan

RISE = Rise(1e-5, 10.0, 121)


def curve_of(loss, rise=RISE) -> Curve:
    curve = Curve()
    for step in range(rise.steps):
        curve.add(rise.rate(step), loss(rise.rate(step)))
    return curve


def typical(rate: float) -> float:
    """A loss that falls fastest at 0.01, and diverges beyond 1."""
    return 2.3 - 2.0 / (1 + (0.01 / rate) ** 2) + (0.0 if rate < 1 else 5.0 * math.log(rate) + 2.5)


def test_the_steepest_descent_and_where_a_loss_explodes_are_found():
    curve = curve_of(typical)
    assert curve.steepest == pytest.approx(0.01, rel=0.25)
    assert 0.7 < curve.diverged < min(2.0, curve.stopped), "it is dated back"
    assert len(curve.losses) < RISE.steps
    curve = curve_of(lambda rate: 1 / (1 + rate) if rate < 0.1 else math.nan)
    assert curve.diverged == pytest.approx(0.1, rel=0.15)
    assert all(map(math.isfinite, curve.losses))
    curve = curve_of(lambda r: typical(min(r, 0.9)) + 3 * math.exp(-((math.log10(r / 0.5) / 0.1) ** 2)))
    assert curve.steepest < 0.1, "a fall after a rise does not count"


def test_a_loss_that_does_not_fall_suggests_nothing_and_negative_ones_do_not_diverge_by_falling():
    found = found_of(curve_of(lambda rate: 2.3 + rate / 100))
    assert found.suggestions == []
    assert "no suggestion" in found.describe()
    curve = curve_of(lambda rate: -2.7 - 2.0 / (1 + (0.01 / rate) ** 2))
    assert curve.stopped is None
    assert curve.steepest == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("plateau", [4.6, 8.6])
def test_a_divergence_that_ends_on_a_plateau_is_one(plateau):
    def loss(rate: float) -> float:
        return 4.2 - 1.6 / (1 + (0.01 / rate) ** 2) + (plateau - 2.6) / (1 + (1.0 / rate) ** 6)

    curve = curve_of(loss)
    assert curve.stopped is None
    assert 0.5 < curve.diverged < 3
    assert len(found_of(curve).suggestions) == 2


def test_noise_suggests_nothing_and_a_fall_within_it_is_found():
    for seed in range(20):
        noise = random.Random(seed)
        curve = curve_of(lambda _, noise=noise: 5.0 + noise.gauss(0, 1))
        assert (curve.steepest, curve.diverged) == (None, None)
    noise = random.Random(1)
    noisy = curve_of(lambda rate: typical(rate) + noise.gauss(0, 0.3))
    assert noisy.steepest == pytest.approx(0.01, rel=0.7)
    assert noisy.diverged is not None


def found_of(curve: Curve, factor: float = 1.0) -> LearningRates:
    scale = BatchScale(2, 64, 32, "linear", factor)
    return LearningRates(
        "digits", "PyTorch on the CPU", scale, curve.rates, curve.losses, curve.diverged, curve.steepest, 10.0
    )


def test_what_is_typed_gives_the_peak_that_is_named():
    once, twice = found_of(curve_of(typical)), found_of(curve_of(typical), factor=2.0)
    for one, other in zip(once.suggestions, twice.suggestions, strict=True):
        assert other.peak == other.learning_rate * 2.0
        assert other.peak == pytest.approx(one.peak, rel=0.01)
    assert len(twice.suggestions) == 2
    assert "the peak is 2 times --learning-rate" in twice.describe()
    assert f"--learning-rate {twice.suggestion:g}" in twice.describe()
    assert [one["loss"] for one in twice.to_document()["curve"]] == twice.losses


def test_rates_out_of_range_are_refused():
    for values in ((0.0, 1.0, 100), (1.0, 0.1, 100), (1e-5, math.inf, 100), (1e-5, 1.0, 5)):
        with pytest.raises(UsageError, match="must be"):
            Rise(*values)


@pytest.mark.parametrize(("compression", "warmup"), [("none", 0.0), ("powersgd:4", 1.0)])
def test_the_suggestion_is_quoted_as_the_job_scales_it_whatever_the_compression(compression, warmup):
    job = Config(
        framework="torch", epochs=9, learning_rate=0.1, compression=compression, warmup_epochs=warmup,
        batch_size=16, base_batch_size=16, lr_scaling="linear",
    )  # fmt: skip
    plan = TrainingPlan.of(rising_config(job, RISE), 2, 1000)
    assert batch_scale(job, plan, 2).peak_by_learning_rate == pytest.approx(2.0)
    assert plan.learning_rate.peak == TrainingPlan.of(job, 2, 1000).learning_rate.peak


@pytest.mark.parametrize(
    ("workers", "everywhere", "state"), [(1, False, 1), (2, True, 1), (2, False, 2)], ids=str
)
def test_a_search_that_fails_on_all_workers_gives_the_weights_back(workers, everywhere, state):
    backend = SimpleNamespace(
        workers=SimpleNamespace(size=workers),
        gather_state=lambda spool=None: SimpleNamespace(read=lambda: 1),
        scatter_state=lambda given: setattr(backend, "state", given),
    )

    def fail() -> None:
        backend.state = 2
        raise TrainingError("no", everywhere=everywhere)

    with pytest.raises(TrainingError), lr_find._state_kept(backend):
        fail()
    assert backend.state == state
