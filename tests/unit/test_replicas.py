"""Whether the workers' parameters are equal: found on every worker, named by rank and parameter."""

import numpy as np
import pytest
from support.fakes import FakeBackend, on_every_rank

from hvdtrain.backends.common import check_replicas
from hvdtrain.backends.trained_set import refused_change
from hvdtrain.config import Config
from hvdtrain.errors import ReplicaDriftError

THAWED, NO_CHANGE = (("x",), (), ()), ((), (), ())


def parameters() -> dict[str, np.ndarray]:
    return {
        "model/a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model/a/bias": np.zeros(3, np.float32),
        "model/b/scale": np.ones((), np.float32),
    }


def drift(change, hosts) -> str:
    """Let ``change(rank, parameters)`` spoil some ranks; give the message, which all must raise alike."""

    def work(workers):
        mine = parameters()
        change(workers.rank, mine)
        check_replicas(FakeBackend(workers, mine))

    outcomes = on_every_rank(hosts, work)
    assert {type(outcome) for outcome in outcomes} == {ReplicaDriftError}
    assert all(outcome.everywhere for outcome in outcomes)
    (said,) = {outcome.problem for outcome in outcomes}
    return said


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_parameters_pass(size):
    work = lambda workers: check_replicas(FakeBackend(workers, parameters()))  # noqa: E731
    assert on_every_rank(["here"] * size, work) == [None] * size


@pytest.mark.parametrize("name", list(parameters()))
def test_a_rank_that_drifted_is_named_with_host_and_parameter(name):
    def change(rank, mine):
        if rank == 2:
            mine[name] = np.nextafter(mine[name], np.float32(9))

    assert drift(change, ["alpha", "alpha", "beta"]) == (
        f"the workers' parameters differ: rank 2 (beta) drifted from the others, first in {name}"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([THAWED, NO_CHANGE, NO_CHANGE], "rank 0 (a) alone thaws x; the other workers did not"),
        ([NO_CHANGE, THAWED, THAWED], "rank 1 (b) thaws x; rank 0 (a) changes nothing"),
        ([THAWED, THAWED, ((), ("y",), ())], "rank 0 (a) thaws x; rank 2 (c) freezes y"),
        ([THAWED, NO_CHANGE, ((), (), ("z",))], "z was replaced in the model during training"),
    ],
)
def test_workers_that_freeze_or_thaw_different_parameters_are_named(changes, said):
    error = refused_change(
        list(zip("abc", changes, strict=True)), Config(framework="torch", task="t.py:T"), False
    )
    assert error is not None
    assert error.problem.startswith(said)
