"""How a worker of an elastic job ends: the driver is told, and one of the workers says it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.elastic_driver import ScriptedDriver

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


def _end(driver, error: str, *answer: End, first: tuple = (), joined: str = "joined") -> tuple[int, str]:
    """Let a worker end with an error; return its exit code and what it said."""
    words = ["-c", ENDS, error, joined] if error else ["-m", "hvdtrain", "--epochs", "many"]
    environ = {**os.environ, **driver.environ}
    with (
        subprocess.Popen([sys.executable, *words], env=environ, stderr=subprocess.PIPE, text=True) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        said = pool.submit(worker.communicate, timeout=300)
        driver.accept(*first, is_welcome=not first)
        if not first:
            driver.expect(Failed)
            driver.say(*answer)
        _, text = said.result()
    return worker.returncode, text


@pytest.fixture
def driver():
    with ScriptedDriver() as driver:
        yield driver


def test_a_worker_that_nobody_else_speaks_for_says_it(driver):
    code, said = _end(driver, "TaskError('no loss', 'Add one.')")
    assert code == 2
    assert "hvdtrain: worker w7 on " in said
    assert said.endswith("no loss\n  Add one.\n")


def test_a_worker_that_failed_because_the_job_ended_ends_as_the_job(driver):
    assert _end(driver, "EnvironmentFault('lost')", End(problem="no loss", exit_code=2)) == (2, "")


def test_an_error_before_a_worker_joined_is_said_by_it_unless_the_job_has_ended(driver):
    code, said = _end(driver, "ConfigError('epochs: -1')", joined="")
    assert (code, "epochs: -1" in said) == (2, True)
    ended = (End(problem="", exit_code=2),)
    assert _end(driver, "ConfigError('epochs: -1')", first=ended, joined="") == (2, "")


def test_all_workers_have_an_error_of_the_command_line_and_one_says_it(driver):
    assert _end(driver, "", End(problem="another worker said it", exit_code=2)) == (2, "")
