"""What all tests share: nothing is skipped where everything is required, and nothing is left running."""

import os
import signal
import threading

import pytest
from support.groups import Files, Groups
from support.jobs import CONTROLLERS, FRAMEWORKS, remove_temporary_folders
from support.pool import POOLS
from support.tiers import is_left_out

from hvdtrain.host.frameworks import load_triton

load_triton()  # tests of both frameworks share processes, and TensorFlow would be in the way of it

JOB_FOLDERS = ("contract", "conformance", "parallel", "faults")
USUAL = ((), ("tf", 2, "gloo"))  # one pool beside those that are in use all the time
REQUIRED = os.environ.get("HVDTRAIN_TESTS_REQUIRED") == "1"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a skip into a failure where every test is required."""
    outcome = yield
    report = outcome.get_result()
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail") and "may_skip" not in item.keywords:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"every test is required here, but this one would be skipped: {reason}"


@pytest.hookimpl(tryfirst=True)  # marks are there before pytest deselects by them
def pytest_collection_modifyitems(items):
    """Run tests that need the same rare pool one after the other, at the end; mark what is of the full tier.

    Each of those pools is launched once. Pools of one worker, and of two over MPI, are in use all the time.
    """
    items.sort(key=_rare_pool)
    for item in items:
        of_jobs = item.path.parent.name in JOB_FOLDERS
        if of_jobs and (_rare_pool(item) not in USUAL or is_left_out(item.nodeid)):
            item.add_marker("full")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give what deals out tests to several processes.

    xdist 3.8 finds the groups of its own mark, asked for with --dist loadgroup, no more with pytest 9.
    """
    schedulers = {"loadfile": Files, "loadgroup": Groups}
    scheduler = schedulers.get(config.getoption("dist"))
    return None if scheduler is None else scheduler(config, log)


def _rare_pool(item):
    """Return what a test's mark or its parameters say of its pool; nothing if it can stay in its place."""
    scopes = {fixture[-1].scope for fixture in item._fixtureinfo.name2fixturedefs.values()}
    if item.path.parent.name not in JOB_FOLDERS[:3] or "module" in scopes:
        return ()
    mark, found = item.get_closest_marker("pool"), getattr(item, "callspec", None)
    params = {} if found is None else found.params
    values = [params.get(name) for name in ("framework", "controller", "workers")]
    values += params.get("job", ()) if mark is None else mark.args
    framework = next((value for value in values if value in FRAMEWORKS), "")
    controller = next((value for value in values if value in CONTROLLERS), "")
    workers = next((value for value in values if isinstance(value, int)), 0)
    is_rare = workers > 2 or (workers == 2 and controller == "gloo")
    return (framework, workers, controller) if is_rare else ()


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of tests inherit it
    config.addinivalue_line("markers", "full: too long for `make test`; .ci/run runs it")
    config.addinivalue_line(
        "markers", "alone: measures speed or fills all cores; no other test may run beside it"
    )
    config.addinivalue_line("markers", "local: a test of a suite whose result depends on no other worker")
    config.addinivalue_line("markers", "pool(framework, controller, workers): which pool a test needs")


def pytest_sessionfinish(session):
    """End the pools."""
    POOLS.end()
    if hasattr(session.config, "workeroutput"):
        remove_temporary_folders()  # xdist ends this process without what is registered for its exit


@pytest.fixture(autouse=True)
def _no_leaks():
    """Fail a test that leaves threads behind or changes the environment."""
    threads, environ = set(threading.enumerate()), dict(os.environ)
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
    for thread in left:
        thread.join(timeout=60)  # Horovod's launcher gives a process it ends 5 s
    left = [t.name for t in left if t.is_alive()]
    changed = {name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name)} - {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "KMP_DUPLICATE_LIB_OK",  # these two by scikit-learn, which may be loaded at any time
        "KMP_INIT_AT_FORK",
    }
    assert not left, f"threads left running: {left}"
    assert not changed, f"environment changed: {changed}"
