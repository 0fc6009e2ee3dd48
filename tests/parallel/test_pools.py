"""Pools keep their cases apart, and end with a case that fails. Their losses: see test_curves.py."""

import os
import signal
import sys
import time

import pytest
from support.jobs import is_running
from support.pool import POOLS, Key, Pool, call

# no framework is loaded: the name distinguishes this pool from others
PROBE = Key("probe", "gloo", 2)


def look() -> dict:
    """Return what a case may have changed for the next; say who looks."""
    print("rank", os.environ["HOROVOD_RANK"], "looks", flush=True)
    os.write(2, b"natively")
    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "mark": os.environ.get("HVDTRAIN_TEST_PROBE"),
        "path": len(sys.path),
        "modules": "mine" in sys.modules,
        "signal": signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
    }


def disturb() -> None:
    """Change all of it."""
    os.environ["HVDTRAIN_TEST_PROBE"] = "changed"
    with open("mine.py", "w") as file:
        file.write("VALUE = 1\n")
    sys.path.insert(0, os.getcwd())
    __import__("mine")
    os.chdir("/")


def fail(seconds: float) -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(seconds)
        raise ValueError("the probe is broken")
    time.sleep(600)


@pytest.fixture(scope="module", autouse=True)
def _no_probe_left():
    yield
    POOLS.drop(PROBE)


@pytest.fixture
def probe(tmp_path):
    """Call a function of this file in the pool."""
    return lambda name, **arguments: call(PROBE, f"{__file__}:{name}", tmp_path, **arguments)


def test_cases_of_one_pool_are_kept_apart(probe, tmp_path):
    before = probe("look", environ={"HVDTRAIN_TEST_PROBE": "given"})
    probe("disturb")
    after = probe("look")
    assert [value["mark"] for value in before.values] == ["given"] * 2
    expected = [{**value, "mark": None} for value in before.values]
    assert after.values == expected, "not the processes and the state of before"
    assert [value["cwd"] for value in after.values] == [str(tmp_path)] * 2
    assert not any(value["modules"] for value in after.values)


def test_a_case_gets_its_own_output(probe):
    for _ in range(2):
        done = probe("look")
        assert done.stdout == "rank 0 looks\nrank 1 looks\n"
        assert done.stderr == "natively" * 2
        assert done.spoke == {0, 1}
    assert probe("disturb").spoke == frozenset()


def test_a_case_that_raises_ends_the_pool_and_the_next_gets_another(probe):
    first = probe("look").values
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\](.|\n)*ValueError: the probe is broken"):
        probe("fail", seconds=0)
    count = len(Pool.launches)
    second = probe("look").values
    assert len(Pool.launches) == count + 1
    assert {value["pid"] for value in first}.isdisjoint(value["pid"] for value in second)


def test_a_case_that_takes_too_long_ends_the_pool_and_says_where_it_stood(probe):
    probe("look")
    with pytest.raises(AssertionError, match=r"failed on ranks \[0, 1\](.|\n)*in fail"):
        probe("fail", seconds=600, timeout=12)


def test_nothing_of_a_pool_is_left(probe):
    pids = [value["pid"] for value in probe("look").values]
    POOLS.drop(PROBE)
    assert [pid for pid in pids if is_running(pid)] == []
