"""What all tests share: nothing is skipped where everything is required, and nothing is left running."""

import os
import threading

import pytest

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


@pytest.fixture(autouse=True)
def _no_leaks():
    """Fail a test that leaves threads behind or changes the environment."""
    threads, environ = set(threading.enumerate()), dict(os.environ)
    yield
    left = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
    for thread in left:
        thread.join(timeout=5)
    left = [t.name for t in left if t.is_alive()]
    changed = {name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name)} - {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
    }
    assert not left, f"threads left running: {left}"
    assert not changed, f"environment changed: {changed}"
