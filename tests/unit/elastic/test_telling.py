"""How a worker of an elastic job ends: the driver is told, and one of the workers says it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.elastic_driver import KEY, ScriptedDriver, accept_worker

from hvdtrain.elastic.messages import End, Failed

ENDS = """
import os, sys
from hvdtrain.elastic.member.membership import connect
from hvdtrain.errors import *
from hvdtrain.jobs.failures import end_worker
if sys.argv[2] == "joined":
    connect(os.environ, stall_timeout=60.0, abort=lambda why: None)
end_worker(eval(sys.argv[1]), debug=False)
"""


def _end(driver, error: str, *answer: End, joined: bool = True, told: type = Failed) -> tuple[int, str]:
    """Let a worker end with an error; return its exit code and what it said."""
    command = [sys.executable, "-c", ENDS, error, "joined" if joined else ""]
    environ = {**os.environ, **driver.environ}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as worker:
        driver.accept()
        driver.expect(told)
        if answer:
            driver.say(*answer)
        _, said = worker.communicate(timeout=300)
        return worker.returncode, said


@pytest.fixture
def driver():
    with ScriptedDriver() as driver:
        yield driver


def test_a_worker_that_nobody_else_speaks_for_says_it(driver):
    code, said = _end(driver, "TaskError('no loss', 'Add one.')")
    assert code == 2
    assert "hvdtrain: worker w7 on " in said
    assert said.endswith("no loss\n  Add one.\n")


def test_a_worker_that_finds_the_job_ended_by_the_same_error_says_nothing(driver):
    command = [sys.executable, "-c", ENDS, "ConfigError('epochs: -1')", ""]
    environ = {**os.environ, **driver.environ}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as worker:
        driver.connection, _ = driver.listener.accept()
        accept_worker(driver.connection, KEY)
        driver.say(End(problem="", exit_code=2))
        _, said = worker.communicate(timeout=300)
    assert (worker.returncode, said) == (2, "")


def test_a_worker_that_failed_because_the_job_ended_ends_as_the_job(driver):
    assert _end(driver, "EnvironmentFault('lost')", End(problem="no loss", exit_code=2)) == (2, "")


def test_a_worker_tells_of_an_error_that_comes_before_it_joined(driver):
    code, said = _end(driver, "ConfigError('epochs: -1')", joined=False)
    assert code == 2
    assert "epochs: -1" in said


def test_all_workers_have_an_error_of_the_command_line_and_one_says_it(driver):
    command = [sys.executable, "-m", "hvdtrain", "--epochs", "many"]
    environ = {**os.environ, **driver.environ}
    with (
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as worker,
    ):
        said = pool.submit(worker.communicate, timeout=300)
        driver.accept()
        assert driver.expect(Failed).blame == "code"
        driver.say(End(problem="another worker said it", exit_code=2))
        assert said.result() == (None, "")
        assert worker.returncode == 2
