"""Several evaluation sets: each sample counts once, with any number of workers, as if its set were alone."""

import functools
from pathlib import Path

import pytest
from support.jobs import FRAMEWORKS
from support.pool import Key, call

TASKS = Path(__file__).with_name("eval_sets_tasks.py")
METRICS = ("loss", "mae")


@pytest.fixture(params=FRAMEWORKS, scope="module")
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def found(framework, tmp_path_factory):
    """What each number of workers found, on rank 0; all ranks have found the same."""

    @functools.cache
    def with_workers(workers: int) -> dict:
        key = Key(framework, "none" if workers == 1 else "mpi", workers)
        done = call(key, f"{TASKS}:evaluated", tmp_path_factory.mktemp("job"), framework=framework)
        assert all(value == done.values[0] for value in done.values)
        return done.values[0]

    return with_workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_second_set_has_the_numbers_that_it_has_alone(found, workers):
    both, alone = found(workers)["TwoSets"], found(workers)["SecondAlone"]
    assert list(both) == [*METRICS, *(f"noisy/{name}" for name in METRICS)]
    assert [both[f"noisy/{name}"] for name in METRICS] == pytest.approx([alone[name] for name in METRICS])
    assert both["noisy/loss"] > 1.5 * both["loss"]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_log_summary_and_evaluate_agree(found, workers):
    results = found(workers)
    assert results["log"] == pytest.approx(results["TwoSets"], rel=1e-6)
    assert results["evaluate"] == pytest.approx(results["TwoSets"], rel=1e-6)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_numbers_do_not_depend_on_the_workers(found, workers):
    assert found(workers)["TwoSets"] == pytest.approx(found(1)["TwoSets"], rel=1e-4)
