"""Runs in MLflow and in Weights & Biases, by their clients."""

import hashlib
import math
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hvdtrain.callbacks import CALLBACK, EVENT
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_TRAINING, EnvironmentFault
from hvdtrain.reporting.jsonl import flattened
from hvdtrain.reporting.records import IMAGES, stored_image
from hvdtrain.reporting.stored_runs import COMPLETED, FAILED, UNSAVED, number, parse_record
from hvdtrain.storage.text import printable
from hvdtrain.storage.urls import shown


@dataclass(frozen=True)
class TrackedRun:
    """What is known of a run in addition to its log."""

    id: str  # the name of the run that all trackers have
    began_seconds: float  # when training began, since the epoch of the system's clock
    # what is known of its last job: the step it began after, hosts, command, commit, changes
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # the run directory
    config: Mapping[str, Any] = field(default_factory=dict)  # the resolved config

    @property
    def resumed(self) -> str:
        """What the last job changed, if it resumed; empty if it did not."""
        step, changes = self.facts.get("step"), "; ".join(map(str, self.facts.get("changes") or []))
        return f"after step {step}: {changes or 'nothing changed'}" if step else ""


class Row(NamedTuple):
    """A line of metrics.jsonl; its numbers have names that begin with the phase, such as "train/loss"."""

    step: int  # the last step before it
    seconds: float  # when it was written, since the epoch of the system's clock
    values: Mapping[str, float]
    texts: Mapping[str, str] = MappingProxyType({})  # of a callback, by such names
    images: Mapping[str, str] = MappingProxyType({})  # likewise; places of files in the run directory


def row_of(line: bytes, began_seconds: float) -> Row | None:
    """Return a line of metrics.jsonl as trackers are sent it; None if it holds no record."""
    if (record := parse_record(line)) is None:
        return None
    phase, seconds = str(record.get("phase")), number(record.get("seconds", 0.0)) or 0.0
    left_out = LINE_FIELDS - {"workers"} | {"generation"} if phase == EVENT else LINE_FIELDS
    found = {f"{phase}/{name}": value for name, value in record.items() if name not in left_out}
    known = found | {name: record[name] for name in ("samples", "epoch") if name in record}
    values = {name: as_float for name, value in known.items() if (as_float := number(value)) is not None}
    logged = list(found.items()) if phase == CALLBACK else []
    texts = {name: text.encode(errors="replace").decode() for name, text in logged if isinstance(text, str)}
    places = {name: value.get("image") for name, value in logged if isinstance(value, dict)}
    images = {name: place for name, place in places.items() if isinstance(place, str)}
    written = began_seconds + (seconds if math.isfinite(seconds) else 0.0)
    return Row(record["step"], written, values, texts, images)


_ADDRESS = re.compile(r"(?<=://)\S+")


def without_password(text: str) -> str:
    """Return a text for files and messages: its addresses have no user, password and query."""
    return shown(_ADDRESS.sub(lambda found: _public(found[0]), text))


def _public(address: str) -> str:
    before, _, query = address.partition("?")
    return "..." if "@" in query else before.rpartition("@")[2]  # it may be the password's question mark


_STATUS = {COMPLETED: "FINISHED", FAILED: "FAILED", UNSAVED: "FAILED"}  # any other end is KILLED
_ID_TAG = "hvdtrain.id"
_MOST = {"metrics": 1000, "params": 100, "tags": 100}  # in one request
_LONGEST_NAME, _LONGEST_FILE, _LONGEST_TEXT, _LONGEST_REASON = 250, 100, 4000, 200  # characters
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# the library's own: how long and how often it calls a server that does not answer, what it prints and reports
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class _Tracker:
    """What trackers have in common."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._refused = note, set[str]()
        self._folder = Path()  # the run directory

    def _leave_out(self, file: str, error: Exception) -> None:
        """Note the first text or image that is not sent."""
        if "files" not in self._refused:
            self._refused.add("files")
            reason = without_password(" ".join(str(error).split()))[:_LONGEST_REASON]
            name = printable(file[:_LONGEST_REASON], lines=False)
            self._note(f"{name} is left out, and other texts and images may be: {reason}")


class MlflowTracker(_Tracker):
    """Sends a run to the server or the store that MLFLOW_TRACKING_URI names.

    The library's asynchronous logging is not used: it drops what a server that is away for a while is sent.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(note)
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:  # the library would make a database in the working directory
            raise EnvironmentFault("MLFLOW_TRACKING_URI is not set", "Set it to the server to send to.")
        if uri.startswith(_DATABASES) and find_spec("sqlalchemy") is None:
            raise EnvironmentFault("mlflow-skinny cannot open MLFLOW_TRACKING_URI", "pip install mlflow")
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import entities

        self._mlflow, self._entities = mlflow, entities
        self._client: Any = mlflow.MlflowClient(uri)
        scheme, mark, address = uri.partition("://")  # all of it, which may have blanks
        self._server, self._run = f"{scheme}{mark}{_public(address)}".rstrip("/"), ""

    def open(self, run: TrackedRun) -> str:
        """Find the run by its tag, or make it; send what is known of it; return its place there."""
        experiment, name = os.environ.get("MLFLOW_EXPERIMENT_ID"), os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not experiment and name:
            there = self._client.get_experiment_by_name(name)
            experiment = there.experiment_id if there is not None else self._client.create_experiment(name)
        experiment = str(experiment or "0")
        found = self._client.search_runs([experiment], f"tags.`{_ID_TAG}` = '{run.id}'", max_results=1)
        one = next(iter(found), None) or self._client.create_run(
            experiment,
            start_time=round(1000 * run.began_seconds),
            run_name=os.environ.get("MLFLOW_RUN_NAME") or run.folder.resolve().name,
            tags={_ID_TAG: run.id, "mlflow.source.name": str(run.config.get("task", ""))},
        )
        self._run, self._folder = one.info.run_id, run.folder
        if one.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        texts = {mlflow_name(name): _text(value) for name, value in flattened(run.config)}
        known = one.data.params  # which MLflow takes only once
        fields = {n: text for n, text in texts.items() if text not in ("", "None") and n not in known}
        self._log("params", [self._entities.Param(*field) for field in fields.items()])
        left_out = ("step", "changes")
        tags = {f"hvdtrain.{n}": fact for n, fact in run.facts.items() if fact and n not in left_out}
        if commit := run.facts.get("commit"):
            tags["mlflow.source.git.commit"] = str(commit)
        if run.resumed:
            tags[f"hvdtrain.resumed.{run.facts['step']}"] = run.resumed
        self._tag(tags)
        if self._server.startswith("http"):
            return f"{self._server}/#/experiments/{experiment}/runs/{self._run}"
        return f"{self._run} of {self._server} experiment {experiment}"

    def send(self, rows: Sequence[Row]) -> None:
        """Send numbers with the time at which they were logged: the same line twice is one point."""
        metrics = [
            self._entities.Metric(mlflow_name(name), value, round(1000 * row.seconds), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        self._log("metrics", metrics)
        for row in rows:
            files: dict[str, str | None] = {}  # texts by their places there; None for images
            for name, text in row.texts.items():
                plain = re.sub(r"[^\w.-]", "_", own := name.partition("/")[2], flags=re.ASCII)
                files[f"texts/step-{row.step:08d}-{_distinct(own, plain, _LONGEST_FILE)}.txt"] = text
            for file, content in (files | dict.fromkeys(row.images.values())).items():
                try:
                    if content is None:
                        self._client.log_artifact(self._run, str(stored_image(self._folder, file)), IMAGES)
                    else:
                        self._client.log_text(self._run, content, file)
                except Exception as error:  # it is not there, or the server's store refuses it
                    self._client.get_run(self._run)  # if the server does not answer, all is sent again later
                    self._leave_out(file, error)

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint's files."""
        self._client.log_artifacts(self._run, str(folder), f"checkpoints/{folder.name}")

    def end(self, status: str, error: str) -> None:
        """Send how the run ended; there is no status if another worker continues it."""
        if status:
            self._tag({"hvdtrain.status": status, **({"hvdtrain.error": error} if error else {})})
            self._client.set_terminated(self._run, status=_STATUS.get(status, "KILLED"))

    def _tag(self, tags: Mapping[str, object]) -> None:
        self._log("tags", [self._entities.RunTag(mlflow_name(name), _text(tags[name])) for name in tags])

    def _log(self, kind: str, values: list[Any]) -> None:
        """Send values; one that MLflow refuses is left out and noted, the others are sent."""
        for first in range(0, len(values), _MOST[kind]):
            part = values[first : first + _MOST[kind]]
            try:
                self._client.log_batch(self._run, **{kind: part})
            except self._mlflow.MlflowException as error:
                reason = without_password(" ".join(str(error).split()))
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                if len(part) > 1:
                    half = len(part) // 2
                    self._log(kind, part[:half])
                    self._log(kind, part[half:])
                elif part[0].key not in reason and "length" not in reason:  # it refuses the whole run
                    raise
                elif part[0].key not in self._refused:
                    self._refused.add(part[0].key)
                    what = f"{kind[:-1]} {part[0].key}"
                    self._note(f"it refuses {what}, which is left out: {reason[:_LONGEST_REASON]}")


def mlflow_name(name: str) -> str:
    """Return a name as MLflow takes it; one that it does not take ends with a hash of the original."""
    path = posixpath.normpath("/" + _NOT_ALLOWED.sub("_", name)).lstrip("/")
    return _distinct(name, path, _LONGEST_NAME)


def _distinct(name: str, plain: str, longest: int) -> str:
    """Return a name if it is plain, otherwise the plain form of it with a hash: no two are the same."""
    if plain == name and len(name) <= longest:
        return name
    end = "_" + hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return plain[: longest - len(end)].rstrip("/") + end


def _text(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


_EXIT_CODES = {COMPLETED: EXIT_DONE, FAILED: EXIT_TRAINING, UNSAVED: EXIT_ENVIRONMENT}
_KILLED = 255  # any other end: what W&B's library sends after Ctrl-C; other codes are shown as failures
WAIT_SECONDS = 10.0  # for its server, in init() and in finish(), which the library also calls at exit


class WandbTracker(_Tracker):
    """Sends a run to the project that WANDB_PROJECT names, or to a folder with WANDB_MODE=offline."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(note)
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._run: Any = None
        self._after: dict[str, int] = {}

    def open(self, run: TrackedRun) -> str:
        """Begin or resume the run with its id; send what is known of it; return its place there."""
        settings = self._wandb.Settings(
            reinit="create_new",  # the task may have a run of its own
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            init_timeout=WAIT_SECONDS, finish_timeout=WAIT_SECONDS, finish_timeout_raises=True,
            x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run = self._wandb.init(
                id=run.id,
                name=os.environ.get("WANDB_NAME") or run.folder.resolve().name,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(run.folder),
                settings=settings,
            )
        except self._wandb.errors.UsageError as error:  # no key, for instance
            remedy = "Log in once with `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
            raise EnvironmentFault(str(error).rstrip("."), remedy) from error
        except Exception:  # its process keeps the run, and would refuse to begin it again
            if self._wandb.run is None:  # the task has none that this would end
                self._wandb.teardown()
            raise
        self._folder, config = run.folder, self._run.config
        self._after = {"resumed_after": run.facts["step"]} if run.resumed else {}
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        config.update({**run.config, "hvdtrain": dict(run.facts)}, allow_val_change=True)
        if run.resumed:
            before = [text for text in config.get("resumed") or [] if text != run.resumed]
            config.update({"resumed": [*before, run.resumed]}, allow_val_change=True)
        if self._run.offline:
            self._note(f"it is offline; later: wandb sync {self._own_folder.with_name(f'*-{self._run.id}')}")
            return f"{self._run.id} of {self._run.project}, offline"
        return without_password(str(self._run.url))

    def send(self, rows: Sequence[Row]) -> None:
        """Pass lines to the library, which writes them to its file at once."""
        for row in rows:
            values = {**row.values, **self._media(row), **self._after, "step": row.step}
            self._run.log({**values, "_timestamp": row.seconds})

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint as an artifact of the type "model"."""
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        artifact.metadata["name"] = folder.name
        self._run.log_artifact(artifact, aliases=["latest", folder.name])

    def end(self, status: str, error: str) -> None:
        """Send how the run ended, and wait some seconds for the library to send what it has."""
        ending = {"hvdtrain/status": status, "hvdtrain/error": error}
        self._run.summary.update({name: text for name, text in ending.items() if text})
        folder = self._own_folder
        try:
            self._run.finish(exit_code=_EXIT_CODES.get(status, _KILLED))
        except TimeoutError:
            self._note(f"its server has not taken all of this run; to send the rest: wandb sync {folder}")

    def _media(self, row: Row) -> dict[str, Any]:
        """Return the texts and images of a line; one that cannot be read is left out."""
        media = dict[str, Any]()
        for name, text in row.texts.items():
            media[name] = self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)
        for name, place in row.images.items():
            try:
                media[name] = self._wandb.Image(str(stored_image(self._folder, place)))
            except Exception as error:  # its library reads the file, which may be damaged
                self._leave_out(place, error)
        return media

    @property
    def _own_folder(self) -> Path:
        return Path(self._run.dir).parent


# what makes a tracker, whose library takes a second or so to load, by its name
CLIENTS: dict[str, Callable[[Callable[[str], None]], Any]] = {"mlflow": MlflowTracker, "wandb": WandbTracker}
