"""What the patched launcher knows of its workers: who has not arrived or ended; and the files of mpirun."""

import contextlib
import multiprocessing
import time
from types import SimpleNamespace

import pytest

from hvdtrain.host import start_reports
from hvdtrain.host.start_reports import report_begin, report_end, reported_start

SLOTS = [
    SimpleNamespace(hostname=host, local_rank=slot)
    for host, slot in (("h1", 0), ("h1", 1), ("h2", 0), ("h2", 1))
]


@pytest.fixture
def driver_service(horovod):
    """The part of the launcher that follows a start."""
    return horovod("horovod.runner.driver.driver_service")


def wait_for(reports, expected) -> None:
    deadline = time.monotonic() + 60
    while (found := reports.arrived()) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_workers_report_their_start_to_the_launcher(driver_service):
    reports = driver_service.StartReports("127.0.0.1")
    environ = {"HOROVOD_START_REPORT": reports.variable}
    assert reports.arrived() == set()
    with contextlib.suppress(ValueError), reported_start(3, environ):
        wait_for(reports, {3})
        raise ValueError
    with reported_start(1, environ):
        wait_for(reports, {1, 3})
    wait_for(reports, None)
    reports.close()


@pytest.mark.parametrize(
    ("ends", "exit_code", "judged"),
    [
        ((None, None), 0, 0),  # both with Python
        ((4, "lost"), 4, 4),  # a worker's own
        ((3, "lost"), 1, 3),  # mpirun's own
        ((None, "lost"), 0, 3),
        (("lost", "lost"), 14, 3),
        (("lost", "lost"), 130, 130),  # a signal
    ],
)
def test_a_job_has_succeeded_if_each_worker_that_began_has_ended_by_itself(
    driver_service, capsys, ends, exit_code, judged
):
    reports = driver_service.StartReports("127.0.0.1")
    for rank, code in enumerate(ends):
        report_begin(rank, {"HOROVOD_START_REPORT": reports.variable})
        if code == "lost":
            start_reports._begun.clear()
        else:
            report_end(code)
    deadline = time.monotonic() + 60
    while len(reports._ended) < len(ends):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reports.judge(exit_code, SLOTS[1:3]) == judged
    said = capsys.readouterr().err
    reports.close()
    assert ("rank 1 (host h2, slot 0) ended before the job was done" in said) == (judged != exit_code)


def test_a_forked_process_of_multiprocessing_reports_its_end(driver_service):
    reports = driver_service.StartReports("127.0.0.1")
    environ = {"HOROVOD_START_REPORT": reports.variable}
    process = multiprocessing.get_context("fork").Process(target=report_begin, args=(0, environ))
    process.start()
    process.join(60)
    assert (process.exitcode, reports.judge(0, SLOTS[:1])) == (0, 0)
    reports.close()
