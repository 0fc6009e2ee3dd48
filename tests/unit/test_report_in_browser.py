"""The page of runs in a real browser: curves are drawn, nothing is fetched, nothing goes wrong."""

import pytest
from support.chromium import IS_MISSING, Browser
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

from hvdtrain.run_views.command import write_report
from hvdtrain.run_views.styles import style_of

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


def test_runs_are_switched_off_and_on_in_all_charts(browser, write, tmp_path):
    page = write(usual(tmp_path / "one"), usual(tmp_path / "two", learning_rate=0.3))
    browser.open(page)
    browser.wait_for_pixels(colour(0), 2, True)
    for expected in (False, True):
        browser.run("document.querySelector('[data-tag=\"run:0\"]').click()")
        for chart in (0, 2):
            browser.wait_for_pixels(colour(0), chart, expected)
            browser.wait_for_pixels(colour(1), chart, True)
    assert_clean(browser, page)


def test_curves_go_over_epochs_samples_and_time(browser, write, tmp_path):
    page = write(usual(tmp_path / "run"))
    browser.open(page)
    lasts = {"epoch": 4, "samples": 1280, "seconds": 8, "step": 40}
    for axis, last in lasts.items():
        browser.run(
            "const select = document.getElementById('axis'); select.value = arguments[0];"
            "select.dispatchEvent(new Event('change', {bubbles: true}))", axis,
        )  # fmt: skip
        ends = "Bokeh.documents[0].roots().map((figure) => figure.x_range.end)"
        browser.wait(f"{ends}.every((end) => {last} <= end && end <= 1.1 * {last})")
        browser.wait_for_pixels(colour(0), 0, True)
    assert_clean(browser, page)


def test_what_the_pointer_is_on_is_told(browser, write, tmp_path):
    page = write(usual(tmp_path / HOSTILE))
    browser.open(page)
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    place = browser.run(
        "const drawn = Bokeh.documents[0].roots()[3];"
        "const all = (view) => [view, ...(view.child_views ?? []).flatMap(all)];"
        "const { frame } = Object.values(Bokeh.index).flatMap(all).find((view) => view.model === drawn);"
        "return [frame.x_scale.compute(20), frame.y_scale.compute(160)]"
    )
    figure = browser.driver.find_elements(By.CSS_SELECTOR, "#charts .chart")[3]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", figure)
    size = figure.size
    offset = round(place[0] - size["width"] / 2), round(place[1] - size["height"] / 2)
    ActionChains(browser.driver).move_to_element_with_offset(figure, *offset).perform()
    browser.wait("deep('.bk-tooltip-row-value').length")
    told = browser.run("return deep('.bk-tooltip-row-value').map((element) => element.textContent)")
    assert [text.strip() for text in told[:3]] == [HOSTILE, "160", "20"]
    assert_clean(browser, page)


def test_nothing_is_wider_than_a_phone(browser, write, tmp_path):
    runs = [usual(tmp_path / ("a-long-name-" * 4 + str(number))) for number in range(9)]
    page = write(*runs)
    browser.open(page, width=380)
    assert browser.run("return document.documentElement.scrollWidth") <= 380
    browser.wait_for_pixels(colour(8), 0, True, least=50)  # the others are below it
    assert_clean(browser, page)


def test_paper_has_whole_charts(browser, write, tmp_path):
    page = write(usual(tmp_path / "run"))
    browser.open(page)
    browser.driver.set_window_size(1280, 1000)
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    browser.wait("Array.from(document.querySelectorAll('.picture')).every((picture) => picture.complete)")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    sizes = browser.run(
        "return Array.from(document.querySelectorAll('figure'), (figure) => [figure.clientWidth,"
        "figure.querySelector('.picture').clientWidth, figure.querySelector('.picture').naturalWidth,"
        "figure.querySelector('.chart').clientWidth])"
    )
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert len(sizes) == 5
    for width, shown, drawn, chart in sizes:
        assert (shown, chart) == (width, 0)
        assert drawn > 200
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


@pytest.mark.parametrize("records", [[], [window(10)], [window(10, loss=None), window(20, loss=None)]])
def test_a_run_that_has_hardly_begun_has_a_page(browser, write, tmp_path, records):
    page = write(make_run(tmp_path / "run", *records, summary=None))
    browser.open(page)
    assert_clean(browser, page)
