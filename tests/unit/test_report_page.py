"""The page of runs without a browser: what it says, its size, and what it refuses."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.stored_runs import SUMMARY, evaluation, make_run, window

from hvdtrain.bench.options import check_writable
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.reporting.lock_state import LockState
from hvdtrain.reporting.stored_runs import find_runs
from hvdtrain.run_views import command
from hvdtrain.run_views.command import write_report
from hvdtrain.run_views.page import _inline, read_for_page


@pytest.fixture
def write(tmp_path):
    """Writes the page of some runs; gives its text, without its script."""

    def page(*runs, verify=True):
        write_report(list(runs), tmp_path / "page.html", verify)
        return (tmp_path / "page.html").read_text().partition('<script type="application/json"')[0]

    return page


def words(page):
    """Give the text of a page, without its marks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def usual(folder, count=40, **options):
    records = [window(step) for step in range(1, count + 1)]
    evaluations = [evaluation(step) for step in range(10, count + 1, 10)]
    return make_run(folder, *records, *evaluations, **options)


def test_a_page_names_results_differences_and_config(write, tmp_path):
    one = usual(tmp_path / "one", config="# python -m hvdtrain --seed 1\nseed: 1\ntask_options: {a: x}\n")
    two = usual(tmp_path / "two", config="seed: 2\n", summary=None)
    text = words(write(one, two))
    assert "one completed torch digits" in text
    assert "0.9750 at step 40" in text
    assert "seed 1 2" in text
    assert "task_options.a x unknown" in text
    assert "config.yaml python -m hvdtrain --seed 1" in text
    assert "two unknown" in text


def test_a_run_that_ends_while_it_is_read_has_its_summary(tmp_path, monkeypatch):
    run = usual(tmp_path / "run", summary=None)

    def let_go(path: Path) -> LockState:
        (path / "summary.json").write_text(json.dumps(SUMMARY))
        return LockState(True, os.getpid(), socket.gethostname())

    monkeypatch.setattr("hvdtrain.reporting.stored_runs.look_at_lock", let_go)
    assert [found.stored.status for found in read_for_page([run], verified=False)] == ["completed"]


@pytest.mark.parametrize(
    ("lock", "age_seconds", "status"),
    [
        (LockState(True), 0, "running"),
        (LockState(False), 60, "killed"),
        (LockState(False), 3, "unknown"),
        (LockState(False, 7, "another-host"), 60, "unknown"),
        (LockState(None), 60, "unknown"),
    ],
)
def test_only_a_run_seen_to_be_dead_is_called_killed(tmp_path, monkeypatch, lock, age_seconds, status):
    run = usual(tmp_path / "run", summary=None)
    then = time.time() - age_seconds
    os.utime(run / "metrics.jsonl", (then, then))
    monkeypatch.setattr("hvdtrain.reporting.stored_runs.look_at_lock", lambda path: lock)
    assert [found.stored.status for found in read_for_page([run], verified=False)] == [status]


def test_a_run_that_goes_on_has_no_status_of_the_job_before(tmp_path, monkeypatch):
    run = usual(tmp_path / "run")
    lock = LockState(True, 7, "", changed_ns=time.time_ns() + 10**9)
    monkeypatch.setattr("hvdtrain.reporting.stored_runs.look_at_lock", lambda path: lock)
    assert [found.stored.status for found in read_for_page([run], verified=False)] == ["running"]


def test_where_runs_came_from_is_named_by_its_keys(write, tmp_path):
    header = "# to repeat this run: python -m hvdtrain x\n# commit: none\n# just words\n# and more\n"
    one = usual(tmp_path / "one", config=f"{header}seed: 1\n")
    two = usual(tmp_path / "two", config="# commit: abc: dirty\nseed: 1\n")
    text = words(write(one, two)).partition("Environment")[2]
    assert "to repeat this run python -m hvdtrain x" in text
    assert "commit none abc: dirty" in text
    assert "config.yaml just words; and more" in text


def test_names_that_are_no_text_are_shown(write, tmp_path):
    name = os.fsdecode(b"r\xfen")
    run = usual(tmp_path / name / "run", config="[")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    other = usual(tmp_path / name / "other", summary={**SUMMARY, "steps": 10**400})
    (other / "summary.json").chmod(0)
    said = write_report([run, other, tmp_path / name / "none"], tmp_path / "page.html", verify=True)
    said.encode()
    assert "r?n" in (tmp_path / "page.html").read_text()


def test_a_script_does_not_end_itself(tmp_path):
    assert _inline('a = "</SCRIPT>";\r\nb = "</p>"') == 'a = "<\\/SCRIPT>";\nb = "</p>"'


def test_a_run_that_cannot_be_looked_at_hides_no_other(tmp_path, monkeypatch):
    usual(tmp_path / "runs" / "a")
    private = usual(tmp_path / "runs" / "private")
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path.parent == private:
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    assert find_runs([tmp_path / "runs"]) == (
        [tmp_path / "runs" / "a"],
        [f"{private}: left out, it cannot be read: Permission denied. Give yourself access: "
         f"chmod -R u+rX {private}."],
    )  # fmt: skip
    with pytest.raises(EnvironmentFault, match=r"private: left out, it cannot be read"):
        find_runs([private])


def test_a_page_of_long_runs_is_small(tmp_path):
    runs = [usual(tmp_path / f"run-{number}", count=3000) for number in range(9)]
    write_report(runs, tmp_path / "page.html", verify=True)
    size = (tmp_path / "page.html").stat().st_size
    assert size < 2_000_000
    assert "thinned out" in (tmp_path / "page.html").read_text()


def test_of_many_runs_configs_and_markers_are_left_out(write, tmp_path):
    runs = [usual(tmp_path / f"run-{number:02}") for number in range(40)]
    page = write(*runs)
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert "Left out for so many runs" in page
    assert "task_options" not in page


def test_a_large_page_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_LARGE_MB", 1.0)
    said = write_report([usual(tmp_path / "run")], tmp_path / "page.html", verify=True)
    assert "note: the page is large" in said


def test_a_folder_stands_for_its_runs_and_others_are_named(tmp_path):
    usual(tmp_path / "runs" / "a")
    usual(tmp_path / "runs" / "b")
    said = write_report([tmp_path / "runs", tmp_path / "none"], tmp_path / "page.html", verify=True)
    assert re.search(r"page\.html: 2 runs, 1\.\d MB", said)
    assert f"note: {tmp_path / 'none'}: left out, it holds no run" in said


def test_a_run_that_cannot_be_read_is_said(write, tmp_path):
    run = usual(tmp_path / "run", config="[")
    (run / "summary.json").write_text("{")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    text = words(write(run))
    for word in ("cannot read summary.json", "config.yaml", "its log cannot be read", "no numbers yet"):
        assert word in text


def test_a_page_is_made_of_a_directory_that_cannot_be_written_and_changes_nothing(write, tmp_path):
    run = usual(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]}
    run.chmod(0o500)
    write(run)
    run.chmod(0o700)
    assert {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]} == before


def test_checkpoints_are_verified(write, train, tmp_path):
    train(epochs=2)
    run = tmp_path / "run"
    first, second = sorted((run / "checkpoints").iterdir())
    content = bytearray((first / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (first / "model.safetensors").write_bytes(content)
    text = words(write(run))
    assert f"{second.name} verified" in text
    assert f"{first.name} damaged: the content of model.safetensors has changed" in text
    assert f"{first.name} not checked" in words(write(run, verify=False))
    assert sorted((run / "checkpoints").iterdir()) == [first, second], "nothing is quarantined"


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_left_out(tmp_path, monkeypatch):
    run = usual(tmp_path / "run")
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)

    def verify(path: Path) -> None:
        path.rmdir()
        raise CorruptCheckpoint("trainer.json is missing")

    monkeypatch.setattr("hvdtrain.run_views.stored_checkpoints.verify", verify)
    assert [found.checkpoints for found in read_for_page([run], verified=True)] == [[]]


@pytest.mark.parametrize("name", ["page.txt", "page", "folder.html"])
def test_another_name_is_refused(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UsageError, match="-o "):
        write_report([usual(tmp_path / "run")], tmp_path / name, verify=True)


def test_a_folder_that_is_not_there_is_made(tmp_path):
    write_report([usual(tmp_path / "run")], tmp_path / "missing" / "a" / "page.html", verify=True)
    assert (tmp_path / "missing" / "a" / "page.html").is_file()
    with pytest.raises(EnvironmentFault, match=r"cannot write /dev/null/a"):
        write_report([tmp_path / "run"], Path("/dev/null/a/page.html"), verify=True)


def test_other_commands_make_the_folders_of_their_files(tmp_path):
    check_writable(tmp_path / "new" / "rates.json", None, tmp_path / "new" / "a" / "rates.svg")
    assert (tmp_path / "new" / "a").is_dir()


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"hvdtrain\[report\]") as error:
        write_report([usual(tmp_path / "run")], tmp_path / "page.html", verify=True)
    assert error.value.exit_code == 2


LOADED = """
import sys, runpy
sys.argv = ["hvdtrain", *sys.argv[1:]]
try:
    runpy.run_module("hvdtrain", run_name="__main__")
finally:
    print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "run"], ["watch", "run"]])
def test_what_draws_is_loaded_by_the_page_alone(tmp_path, arguments):
    usual(tmp_path / "run", summary=SUMMARY)
    environ = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    assert not loaded & {"bokeh", "jinja2", "torch", "tensorflow", "keras", "horovod", "pandas"}
