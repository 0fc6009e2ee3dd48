"""Several evaluation sets: each sample counts once, with any number of workers, as if its set were alone."""

import functools
from pathlib import Path

import pytest
from support.pool import Key, call, controller_of

TASKS = Path(__file__).with_name("eval_sets_tasks.py")
METRICS = ("loss", "mae")
COMMANDS = {1: ["export"], 2: ["evaluate", "predict"]}  # that take the checkpoint, by the number of workers


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each number of workers found, on rank 0; all ranks have found the same."""

    @functools.cache
    def with_workers(workers: int, framework: str = "torch") -> dict:
        key = Key(framework, controller_of(framework, workers), workers)
        folder, commands = (
            tmp_path_factory.mktemp("job"),
            COMMANDS[workers],
        )
        done = call(key, f"{TASKS}:evaluated", folder, framework=framework, commands=commands)
        assert all(value == done.values[0] for value in done.values)
        return done.values[0]

    return with_workers


# sets are passed over by the loop, which both frameworks share
@pytest.mark.parametrize(("workers", "framework"), [(1, "torch"), (2, "torch")])
def test_the_second_set_has_the_numbers_that_it_has_alone(found, workers, framework):
    seen = found(workers, framework)
    both, alone = seen["run"], seen["alone"]
    assert list(both) == [*METRICS, *(f"noisy/{name}" for name in METRICS)]
    assert [both[f"noisy/{name}"] for name in METRICS] == pytest.approx([alone[name] for name in METRICS])
    assert both["noisy/loss"] != pytest.approx(both["loss"], rel=0.1)
    assert seen["log"] == both


def test_the_numbers_do_not_depend_on_the_workers(found):
    assert found(2)["run"] == pytest.approx(found(1)["run"], rel=1e-4)


def test_evaluate_goes_over_all_sets_and_predict_over_the_first(found):
    assert found(2)["evaluate"] == pytest.approx(found(2)["run"], rel=1e-6)
    assert found(2)["predict"]["loss"] == pytest.approx(found(2)["run"]["loss"], rel=1e-4)


def test_export_compares_outputs_on_the_first_set(found):
    assert found(1)["export"]["relative"] < 1e-4
