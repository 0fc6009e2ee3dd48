"""Sending a run to MLflow."""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.reporting.run_status import COMPLETED, FAILED, UNSAVED
from hvdtrain.tracking.folder import without_password
from hvdtrain.tracking.mlflow_names import MlflowNames
from hvdtrain.tracking.rows import Row
from hvdtrain.tracking.state import SenderState
from hvdtrain.tracking.tracker import PermanentError, TrackedRun

_STATUS = {COMPLETED: "FINISHED", FAILED: "FAILED", UNSAVED: "FAILED"}  # any other end is KILLED
_ID_TAG, _STEP_TAG, _REPEATED_TAG = "hvdtrain.id", "hvdtrain.last_step", "hvdtrain.repeated_steps"
_RESUMED_TAG = "hvdtrain.resumed."
_NOT_TAGGED = ("time", "seconds", "step", "changes")
_MOST_VALUES, _MOST_TAGS = 1000, 100  # in one request
_LONGEST_REASON = 200  # characters
_MOST_TEXT = 4000  # characters of a parameter or a tag
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# the library's own: how long and how often it asks a server that does not answer, and what it prints
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a message has the URL
}


class MlflowTracker:
    """Sends a run to the server or the store that MLFLOW_TRACKING_URI names."""

    ends_last = False

    def __init__(self) -> None:
        _check_uri(os.environ.get("MLFLOW_TRACKING_URI", ""))
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow import entities

        self._mlflow, self._entities = mlflow, entities
        self._client: Any = mlflow.MlflowClient()
        self._run, self._resumes = "", 0
        self._metric_names, self._tag_names = MlflowNames(), MlflowNames()
        self._refused: set[str] = set()
        self.notes: list[str] = []

    def open(self, run: TrackedRun, state: SenderState) -> bool:
        """Find the run by its tag, or make it."""
        experiment = self._experiment()
        server = without_password(self._mlflow.get_tracking_uri()).rstrip("/")
        target = f"{server} experiment {experiment}"
        tags = f"tags.`{_ID_TAG}` = '{run.tracking_id}'"
        found = self._client.search_runs([experiment], tags, max_results=1)
        if found:
            one = found[0]
        else:
            one = self._client.create_run(
                experiment,
                start_time=_milliseconds(run.began_seconds),
                run_name=os.environ.get("MLFLOW_RUN_NAME") or run.name,
                tags={_ID_TAG: run.tracking_id, "mlflow.source.name": str(run.config.get("task", ""))},
            )
        self._run = one.info.run_id
        self._resumes = sum(name.startswith(_RESUMED_TAG) for name in one.data.tags)
        if one.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        is_known = state.target == target and state.run == self._run
        if not is_known:
            state.last_step = int(one.data.tags.get(_STEP_TAG, -1))
        state.target, state.run = target, self._run
        is_server = server.startswith("http")
        state.url = f"{server}/#/experiments/{experiment}/runs/{self._run}" if is_server else ""
        self._send_config(run, one.data.params)
        return is_known

    def is_up_to_date(self, state: SenderState) -> bool:
        """Return False: the run may be another one by now, or have been deleted there."""
        return False

    def start(self, start: Mapping[str, Any], number: int) -> None:
        """Send a job's facts as tags; of one that resumes, also what differs from the one before."""
        known = {name: value for name, value in start.items() if name not in _NOT_TAGGED and value}
        tags = {f"hvdtrain.{name}": _text(value) for name, value in known.items()}
        if commit := start.get("commit"):
            tags["mlflow.source.git.commit"] = str(commit)
        resumes = self._resumes  # other directories may have had some
        if start["step"] or number:
            changes = "; ".join(map(str, start.get("changes") or [])) or "nothing changed"
            resumes += 1
            tags[f"{_RESUMED_TAG}{resumes}"] = _text(f"after step {start['step']}: {changes}")
        self._tag(tags)
        self._resumes = resumes

    def send(self, rows: Sequence[Row]) -> None:
        """Send numbers, with the time at which they were logged: the same line twice is one point."""
        metrics = [
            self._entities.Metric(self._metric_names.of(name), value, _milliseconds(row.seconds), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        events = {f"hvdtrain.workers_changed.{row.step}": _text(row.event) for row in rows if row.event}
        for part in _parts(metrics, _MOST_VALUES):
            self._log("metrics", part)
        if windows := [row.step for row in rows if row.is_window]:
            events[_STEP_TAG] = str(windows[-1])
        self._tag(events)

    def repeat(self, first: int, last: int) -> None:
        """Say in a tag which steps have two points."""
        before = self._client.get_run(self._run).data.tags.get(_REPEATED_TAG, "")
        self._tag({_REPEATED_TAG: ", ".join(filter(None, [before, f"{first}-{last}"]))})

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint's files."""
        self._client.log_artifacts(self._run, str(folder), f"checkpoints/{folder.name}")

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send how the run ended."""
        tags = {"hvdtrain.status": status}
        if summary.get("error"):
            tags["hvdtrain.error"] = _text(summary["error"])
        self._tag(tags)
        self._client.set_terminated(self._run, status=_STATUS.get(status, "KILLED"))

    def _experiment(self) -> str:
        """Return the experiment's id, as the library's environment variables name it."""
        if found := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return found
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return "0"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except Exception:  # another job made it meanwhile
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _send_config(self, run: TrackedRun, known: Mapping[str, str]) -> None:
        """Send the fields of the config that the run does not have: they can be sent only once."""
        names = MlflowNames()
        fields = {names.of(name): value for name, value in _flat(run.config) if value not in ("", "None")}
        params = [self._entities.Param(name, value) for name, value in fields.items() if name not in known]
        for part in _parts(params, _MOST_TAGS):
            self._log("params", part)

    def _tag(self, tags: Mapping[str, str]) -> None:
        made = [self._entities.RunTag(self._tag_names.of(name), value) for name, value in tags.items()]
        for part in _parts(made, _MOST_TAGS):
            self._log("tags", part)

    def _log(self, kind: str, values: list[Any]) -> None:
        """Send values in one request; one that MLflow refuses is left out and noted, the others are sent."""
        try:
            self._client.log_batch(self._run, **{kind: values})
        except self._mlflow.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(values) > 1:
                for part in _parts(values, (len(values) + 1) // 2):
                    self._log(kind, part)
                return
            what, reason = f"{kind[:-1]} {values[0].key}", without_password(" ".join(str(error).split()))
            if values[0].key not in reason and "length" not in reason:  # it refuses the whole run
                raise
            if what not in self._refused:
                self._refused.add(what)
                self.notes.append(f"it refuses {what}, which is left out: {reason[:_LONGEST_REASON]}")


def _check_uri(uri: str) -> None:
    """Check that the client can send to what MLFLOW_TRACKING_URI names.

    Raises:
        PermanentError: If it is empty, or a database without the package that opens it.
    """
    if not uri:  # the library would make a database in the working directory
        raise PermanentError("MLFLOW_TRACKING_URI is not set: it names the server to send to")
    if uri.partition(":")[0].partition("+")[0] in _DATABASES and find_spec("sqlalchemy") is None:
        raise PermanentError(
            "MLFLOW_TRACKING_URI names a database, which mlflow-skinny cannot open: install mlflow"
        )


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of values, those of a mapping in it with its name before them."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _text(value)


def _text(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]
