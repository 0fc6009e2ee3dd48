"""A headless Chromium that looks at a page, with what it fetched and what went wrong."""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
IS_MISSING = "" if Path(CHROMIUM).exists() and Path(DRIVER).exists() else "needs chromium and chromedriver"
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,1000",
)  # fmt: skip
# elements of a page, those in shadow trees included
_DEEP = """
function deep(selector, root = document) {
  const found = Array.from(root.querySelectorAll(selector));
  for (const element of root.querySelectorAll("*")) {
    if (element.shadowRoot) { found.push(...deep(selector, element.shadowRoot)); }
  }
  return found;
}
"""


class Browser:
    """A browser, closed at the end of its context."""

    def __init__(self) -> None:
        from selenium import webdriver

        self._folder = tempfile.mkdtemp(prefix="hvdtrain-chromium-")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for option in (*_OPTIONS, f"--user-data-dir={self._folder}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.driver.set_page_load_timeout(60)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, page: Path, width: int = 1280) -> None:
        """Open a page, and wait until its charts are drawn."""
        self.driver.get("about:blank")
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(page.as_uri())
        self.wait("document.body.dataset.state === 'ready'")
        self.wait("!window.Bokeh || Bokeh.documents.every((drawn) => drawn.is_idle)")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(_DEEP + script, *arguments)

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < until, f"never: {condition}; {self.errors()}"
            time.sleep(0.05)

    def pixels(self, colour: str, chart: int = 0) -> int:
        """Return how many pixels of a chart have about a colour, given in hexadecimal."""
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        return int(self.run(_PIXELS, chart, [red, green, blue]))

    def wait_for_pixels(self, colour: str, chart: int, shown: bool, least: int = 100) -> None:
        """Wait until a chart has a colour, or has it no longer: the library draws when the browser asks."""
        until = time.monotonic() + 20
        while (self.pixels(colour, chart) > least) != shown:
            assert time.monotonic() < until, f"chart {chart}: {colour} {'never' if shown else 'always'} shown"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """Return errors and warnings of the console since the last call, without those of ``pixels``."""
        entries = [entry for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [entry["message"] for entry in entries if "willReadFrequently" not in entry["message"]]

    def fetched(self) -> list[str]:
        """Return what was fetched since the page was opened, without what lies in it."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "blob:", "chrome:", "about:"))]


_PIXELS = """
const figure = document.querySelectorAll("#charts .chart")[arguments[0]], wanted = arguments[1];
let count = 0;
const all = deep("canvas", figure.querySelector("*").shadowRoot ?? figure);
for (const canvas of all) {
  if (!canvas.width || !canvas.height) { continue; }
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4) {
    const is_near = wanted.every((value, part) => Math.abs(data[i + part] - value) < 24);
    if (is_near && data[i + 3] > 128) { count += 1; }
  }
}
return count;
"""
