"""A page of runs: read, drawn and put together as one HTML file that needs no network.

Texts of runs may come from strangers. The template escapes them, and the page's own policy lets a browser run
only the scripts that are part of it, by their hashes, and fetch nothing.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import hvdtrain
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.storage import checkpoints_in, read_manifest, verify
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.reporting import stored_runs
from hvdtrain.reporting.compare import FACTS, Row, differing_fields, metric_names, row_of
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.reporting.stored_runs import StoredRun, find_runs, metric_text, number_text, plain
from hvdtrain.storage.text import counted
from hvdtrain.tools.report.run_log import RunEvent, RunLog, history_of, read_log

_MANY = 16  # runs, the configs of which are in the page
_VERIFIED = 100  # checkpoints of a run, the newest


def write_report(run_dirs: Sequence[Path], output: Path, verified: bool) -> str:
    """Write a page of runs, whose checkpoints may be ``verified`` byte by byte; return what was written."""
    if find_spec("bokeh") is None:
        raise EnvironmentFault(
            "report: Bokeh, which draws the curves, is not installed",
            "Install it: python -m pip install bokeh.",
        )
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: the name must end in .html")
    if output.exists() and not output.is_file():
        raise UsageError(f"-o {output}: it is there and is no file")
    paths, left_out = find_runs(run_dirs)
    runs = []
    for name, path in zip(stored_runs.names_of(paths), paths, strict=True):
        stored, log = stored_runs.read_run(path), read_log(path)
        history = history_of(path, log, stored.summary)
        checkpoints = stored_checkpoints(path, verified)
        runs.append(RunOnPage(stored, row_of(name, stored), log, history, *checkpoints))
    page = render(runs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, page)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    size = len(page.encode()) / 1e6
    lines = [f"{plain(str(output))}: {counted(len(paths), 'run')}, {size:.1f} MB"]
    return "\n".join([*lines, *(f"note: {note}" for note in left_out)])


class StoredCheckpoint(NamedTuple):
    """What is known of a checkpoint."""

    path: Path  # its directory
    state: str  # "verified", "not checked", or what is wrong with it
    manifest: Manifest | None  # its manifest; None if that cannot be read


def stored_checkpoints(run_dir: Path, verified: bool = True) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the checkpoints of a run, the newest last, and what to say of others."""
    folder = run_dir / "checkpoints"
    try:
        paths = checkpoints_in(folder)
        set_aside = sorted(path.name for path in folder.iterdir() if path.name.startswith("set-aside-"))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [plain(f"checkpoints cannot be read: {error}")]
    notes = [plain(f"damaged, and set aside: {', '.join(set_aside)}")] if set_aside else []
    newest = paths[-_VERIFIED:] if verified else []
    found = [StoredCheckpoint(path, _state(path, path in newest), read_manifest(path)) for path in paths]
    return [one for one in found if one.path.exists()], notes  # the run may have deleted it meanwhile


def _state(path: Path, verified: bool) -> str:
    if not verified:
        return "not checked"
    try:
        verify(path)
    except CorruptCheckpoint as error:
        return plain(f"damaged: {error}")
    except EnvironmentFault as error:
        return plain(f"cannot be read: {error.problem}")
    return "verified"


def results_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the titles of columns, and a row for each run with its last and best metrics."""
    facts = [name for name in FACTS if name != "status" and any(row.facts.get(name) for row in rows)]
    metrics, trained = metric_names(rows), metric_names(rows, is_trained_only=True)
    head = ["run", "status", *facts, "seconds", "samples/s", "peak MiB"]
    head += [f"{which} {name}" for name in metrics for which in ("last", "best")]
    head += [f"last {name} in training" for name in trained]
    return [head, *(
        [row.name, *(row.facts.get(name, "") for name in ("status", *facts)),
         number_text(row.seconds, ",.1f"), number_text(row.samples_per_second, ",.0f"),
         number_text(row.peak_memory_mib, ",.0f"),
         *(cell for name in metrics for cell in (_last(row, name, row.is_trained_only), _best(row, name))),
         *(_last(row, name, not row.is_trained_only) for name in trained)]
        for row in rows
    )]  # fmt: skip


def _last(row: Row, name: str, is_of_others: bool) -> str:
    return "" if is_of_others or name not in row.last else metric_text(row.last[name])


def _best(row: Row, name: str) -> str:
    if (best := row.best.get(name)) is None:
        return ""
    return metric_text(best.value) + (f" at step {best.step:,}" if best.step is not None else "")


class RunOnPage(NamedTuple):
    """All that a page shows of a run."""

    stored: StoredRun  # its small files, and how it ended or stands
    row: Row  # its results
    log: RunLog  # its curves
    history: Sequence[RunEvent]  # what happened to it
    checkpoints: Sequence[StoredCheckpoint]  # its checkpoints
    checkpoint_notes: Sequence[str]  # what to say of others

    def best_at(self, checkpoint: StoredCheckpoint) -> str:
        """Return which metrics are best at a checkpoint, as text."""
        step = checkpoint.manifest and checkpoint.manifest.step
        names = [name for name, best in self.row.best.items() if best.step is not None and best.step == step]
        return f" (best {', '.join(names)})" if names else ""


def render(runs: Sequence[RunOnPage]) -> str:
    """Return the page as HTML. Bokeh and Jinja2, which it brings, are imported here."""
    import jinja2
    from bokeh.resources import Resources
    from markupsafe import Markup

    from hvdtrain.tools.report.charts import Style, draw, plan_charts

    rows = [run.row for run in runs]
    names = [row.name for row in rows]
    charts, notes = plan_charts([run.log for run in runs])
    documents, items, places = draw(charts, names)
    library = _inline("\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw))
    own = _inline(_part("page.js"))
    templates = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    # Bokeh reads its document in order: what is referred to comes first
    templates.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    found = [(run.row.name, text) for run in runs for text in (run.row.problem, run.log.problem)]
    problems = [f"{name}: {plain(text)}." for name, text in found if text]
    configs = []
    for stored in (run.stored for run in runs[:_MANY]):
        shown = {"directory": plain(str(stored.path))}
        if stored.lock.host:
            shown["last job"] = plain(stored.lock.describe().removeprefix(": "))
        configs.append(shown | {"comment": "; ".join(stored.header)} | stored_runs.flat(stored.config))
    return templates.from_string(_part("page.html.j2")).render(
        title=f"hvdtrain: {names[0]}" if len(names) == 1 else f"hvdtrain: {len(names)} runs",
        version=hvdtrain.__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        style=Markup(_part("page.css")),
        library=Markup(library),
        script=Markup(own),
        hashes=[_hash(library), _hash(own)],
        drawing={"documents": documents, "items": items},
        charts=list(zip(charts, places, strict=True)),
        runs=runs,
        styles=[Style.of(number) for number in range(len(runs))],
        notes=[*problems, *notes],
        results=results_table(rows),
        differences=differing_fields(rows),
        configs=configs,
        metrics_text=stored_runs.metrics_text,
    )


def _part(name: str) -> str:
    return files("hvdtrain.tools.report").joinpath(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """Return a script as it can be part of a page, where nothing in its texts ends it.

    A browser changes ends of lines before it hashes a script: there are only those that it leaves.
    """
    script = script.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub("</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
