"""The page of runs in a real browser: curves are drawn, nothing is fetched, nothing goes wrong."""

import pytest
from support.chromium import IS_MISSING, Browser
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

from hvdtrain.tools.report.charts import style_of
from hvdtrain.tools.report.page import write_report

pytestmark = pytest.mark.skipif(bool(IS_MISSING), reason=IS_MISSING)

HOSTILE = "<img src=x onerror=window.hacked=1>{{7*7}}@step $name"
SCRIPT = "</script><script>window.hacked=1</script><svg onload=window.hacked=1>"
STEPS = range(1, 41)


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def write(tmp_path):
    """Writes the page of some runs; gives its path."""

    def page(*runs):
        write_report(list(runs), tmp_path / "page.html", verify=True)
        return tmp_path / "page.html"

    return page


def usual(folder, **changes):
    records = [window(step, loss=1 / step, **changes) for step in STEPS]
    return make_run(folder, *records, *(evaluation(step) for step in STEPS if step % 10 == 0))


def assert_clean(browser, page):
    assert browser.errors() == []
    assert browser.fetched() == [page.as_uri()]
    assert browser.run("return window.hacked") is None


def colour(run):
    return style_of(run).colour


def test_curves_are_drawn_and_nothing_is_fetched(browser, write, tmp_path):
    page = write(usual(tmp_path / "run"))
    browser.open(page)
    charts = browser.run("return document.querySelectorAll('#charts .chart').length")
    assert charts == 5
    for chart in range(charts):
        browser.wait_for_pixels(colour(0), chart, True)
    assert browser.pixels(colour(1)) == 0
    assert browser.run("return getComputedStyle(document.body).fontSize") == "15px"
    assert_clean(browser, page)


def test_a_strangers_run_runs_no_script(browser, write, tmp_path):
    summary = {
        **SUMMARY,
        "status": SCRIPT,
        "task": SCRIPT,
        "error": SCRIPT,
        "final": {SCRIPT: 1.0, HOSTILE: 2.0},
    }
    names = {SCRIPT: 0.5, HOSTILE: 0.5, "__proto__": 1.0, "constructor": 1.0}
    changed = change(20, left=[SCRIPT], cause=SCRIPT)
    records = [window(10, **names), window(20, **names), evaluation(20, **names), changed]
    config = f"# {SCRIPT}\ntask: {SCRIPT!r}\n{HOSTILE!r}: {SCRIPT!r}\n"
    page = write(
        make_run(tmp_path / HOSTILE, *records, summary=summary, config=config), usual(tmp_path / "b")
    )
    browser.open(page)
    text = browser.run("return document.body.innerText")
    assert SCRIPT in text
    assert HOSTILE in text
    assert browser.run("return document.querySelectorAll('img, svg[onload]').length") == 0
    assert_clean(browser, page)
