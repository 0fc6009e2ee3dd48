"""What MLflow is sent: names that it takes, and the other values if it refuses one."""

import re
from unittest.mock import Mock

import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.trackers import services
from hvdtrain.trackers.services import MlflowTracker, Row, TrackedRun, mlflow_name

ID = "0123456789abcdef"
ODD_NAMES = ["a//b", "a/b", "../../x", "..", "f(x)", "f[x]", "é", "n" * 300, "n" * 300 + "m", "a/"]


class Client:
    """A client that keeps what it is sent, and refuses a batch as a server does."""

    def __init__(self, refused: str = "", reason: str = "") -> None:
        self.refused, self.reason, self.requests = refused, reason, 0
        self.sent: dict[str, list] = {"metrics": [], "params": [], "tags": []}

    def log_batch(self, run_id, **given) -> None:
        from mlflow.exceptions import INVALID_PARAMETER_VALUE, MlflowException

        ((kind, values),) = given.items()
        self.requests += 1
        if any(value.key == self.refused for value in values):
            raise MlflowException(self.reason, INVALID_PARAMETER_VALUE)
        self.sent[kind] += values

    def search_runs(self, *words, **options) -> list:
        return []

    def create_run(self, *words, **options):
        return Mock(info=Mock(run_id="run", status="RUNNING"), data=Mock(tags={}, params={}))


@pytest.fixture
def tracker(monkeypatch):
    """Gives a tracker whose client keeps what it is sent."""
    pytest.importorskip("mlflow")
    monkeypatch.setattr(services, "_SETTINGS", {})  # environment variables that it sets
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    notes: list[str] = []
    made = MlflowTracker(notes.append)
    made.notes = notes
    made._client = Client()
    return made


def test_mlflow_takes_each_name_and_no_two_become_one():
    validation = pytest.importorskip("mlflow.utils.validation")
    found = [mlflow_name(name) for name in ODD_NAMES]
    for name in found:
        validation._validate_metric_name(name)
        validation._validate_tag_name(name)
        validation._validate_length_limit("name", 250, name)
    assert len(set(found)) == len(found)
    assert mlflow_name("train/loss") == "train/loss"


def test_where_it_sends_is_checked_before_the_library_is_loaded(monkeypatch):
    monkeypatch.setattr("hvdtrain.trackers.services.find_spec", lambda name: None)
    for uri, text in (("", "is not set"), ("postgresql+psycopg2://host/db", "cannot open")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(EnvironmentFault, match=text):
            MlflowTracker(print)


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("http://user:pw@host:5000/", "http://host:5000/#/experiments/0/runs/run"),
        ("https://user:p?w@host", "https://.../#/experiments/0/runs/run"),
        ("mssql+pyodbc:///?odbc_connect=DRIVER={a b};PWD%3Dpw", "run of mssql+pyodbc: experiment 0"),
    ],
)
def test_the_place_of_a_run_has_the_address_without_user_password_and_query(tracker, monkeypatch, uri, place):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr("mlflow.MlflowClient", lambda uri: Client())
    monkeypatch.setattr("hvdtrain.trackers.services.find_spec", lambda name: name)
    assert MlflowTracker(print).open(TrackedRun(ID, 0.0)) == place


def test_what_mlflow_refuses_is_left_out_and_noted_once(tracker):
    tracker._client = Client("train/bad", "Invalid value for 'train/bad'")
    for _ in range(2):
        tracker.send([Row(1, 2.0, {"train/loss": 0.5, "train/bad": 1, "train/other": 2})])
    assert [metric.key for metric in tracker._client.sent["metrics"]] == ["train/loss", "train/other"] * 2
    (note,) = tracker.notes
    assert note.startswith("it refuses metric train/bad, which is left out: Invalid value")
    tracker._client = Client("train/bad", "Invalid value for 'train/bad'")
    tracker.send([Row(1, 2.0, {"train/bad": 1} | {f"n{number}": number for number in range(255)})])
    assert (len(tracker._client.sent["metrics"]), tracker._client.requests) == (255, 1 + 2 * 8), "by halves"


def test_texts_and_images_are_artifacts_and_one_that_is_not_there_is_left_out(tracker, tmp_path):
    client = tracker._client
    client.log_text, client.log_artifact, client.get_run = Mock(), Mock(), Mock()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "step-00000007-x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    tracker.open(TrackedRun(ID, 0.0, folder=tmp_path))
    places = [f"images/step-0000000{number}-x.png" for number in (8, 7, 9)]
    images = {f"callback/{number}": place for number, place in enumerate([*places, "../x.png"])}
    row = Row(7, 0.0, {}, {"callback/said": "one", "callback/../é": "two"}, images)
    tracker.send([row])
    (_, text, plain), (_, _, odd) = (call.args for call in client.log_text.call_args_list)
    assert (text, plain) == ("one", "texts/step-00000007-said.txt")
    assert re.fullmatch(r"texts/step-00000007-\.\.___[0-9a-f]{8}\.txt", odd)
    client.log_artifact.assert_called_once_with("run", f"{tmp_path}/images/step-00000007-x.png", "images")
    (note,) = tracker.notes
    assert note.startswith(f"{places[0]} is left out, and other texts and images may be: [Errno 2]")
    client.log_text.side_effect = client.get_run.side_effect = ConnectionError("down")
    with pytest.raises(ConnectionError):  # so that it is sent again
        tracker.send([row])
