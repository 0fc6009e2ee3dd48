"""Run directories of other users: what cannot be read is said, with the remedy."""

import os
from pathlib import Path

import pytest
from support.stored_runs import make_run, window

from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault
from hvdtrain.jobs.track import track_runs
from hvdtrain.reporting.compare import print_table
from hvdtrain.tools.report.page import write_report
from hvdtrain.tools.report.watch import follow

REMEDY = r"Its owner can give access: chmod -R a\+rX .*run\."


@pytest.fixture(params=["file", "folder"])
def private(request, tmp_path, monkeypatch):
    """Gives a run of another user, whose log or whose directory this one may not read."""
    run = make_run(tmp_path / "run", window(10), summary=None)

    def refused(path) -> bool:
        name = "metrics.jsonl" if request.param == "file" else ""
        return str(path).startswith(str(run / name)) and Path(path) != run

    def fake(original, allowed=None):
        def call(path, *args, **options):
            if not isinstance(path, int) and refused(path):
                if allowed is not None:
                    return allowed
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *args, **options)

        return call

    monkeypatch.setattr(os, "open", fake(os.open))
    monkeypatch.setattr(os, "access", fake(os.access, allowed=False))
    if request.param == "folder":
        monkeypatch.setattr(Path, "stat", fake(Path.stat))
    return run


def test_every_command_names_the_remedy(private, tmp_path):
    for command in (
        lambda: print_table([private]),
        lambda: write_report([private], tmp_path / "page.html", verified=False),
        lambda: follow(private),
        lambda: track_runs([private], [], False, print),
    ):
        with pytest.raises(EnvironmentFault, match=REMEDY) as error:
            command()
        assert error.value.exit_code == EXIT_ENVIRONMENT
        assert "Permission denied" in str(error.value)


def test_track_writes(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", window(10))
    monkeypatch.setattr("hvdtrain.jobs.track.check_installed", lambda names: None)

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentFault, match=r"Its owner can give access: chmod -R a\+rwX .*run\."):
        track_runs([run], ["mlflow"], False, print)
