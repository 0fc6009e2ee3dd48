"""The edit table, and how the edited launcher ends its workers."""

import contextlib
import ctypes
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import edit_ending_texts as ending
from hvdtrain.horovod_build import edit_launcher_texts as launcher
from hvdtrain.horovod_build import edit_texts as texts
from hvdtrain.horovod_build.edit_table import EDITS
from hvdtrain.horovod_build.edits import Edit, apply_edits, edits_digest

DOCS = Path(__file__).parents[3] / "docs" / "horovod.md"


def made_up_source(folder: Path) -> Path:
    for edit in EDITS:
        path = folder / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "# head\n"
        path.write_text(before + f"# {edit.name}\n" + edit.find * edit.times + "\n")
    return folder


def test_every_edit_applies_to_a_source_that_has_its_text(tmp_path):
    tree = made_up_source(tmp_path)
    apply_edits(tree, EDITS)
    for edit in EDITS:
        text = (tree / edit.file).read_text()
        assert text.count(edit.replacement) >= edit.times, edit.name
        assert edit.find in edit.replacement or edit.find not in text, edit.name


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_a_source_that_differs_stops_the_build_naming_the_edit(tmp_path, edit):
    tree = made_up_source(tmp_path)
    path = tree / edit.file
    path.write_text(path.read_text().replace(edit.find, "something else\n"))
    with pytest.raises(HorovodBuildError, match=re.escape(repr(edit.name))) as error:
        apply_edits(tree, EDITS)
    assert edit.file in error.value.problem


def test_a_text_that_occurs_too_often_stops_the_build(tmp_path):
    (tmp_path / "a.txt").write_text("x x")
    with pytest.raises(HorovodBuildError, match="2 times there, not 1"):
        apply_edits(tmp_path, [Edit("twice", "a.txt", "x", "y", "", "")])


def test_a_missing_file_stops_the_build(tmp_path):
    with pytest.raises(HorovodBuildError, match=r"no file gone\.txt"):
        apply_edits(tmp_path, [Edit("missing", "gone.txt", "x", "y", "", "")])


def test_the_digest_follows_what_is_done_and_not_the_reasons():
    edit = Edit("a", "file", "x", "y", "because", "none found")
    assert edits_digest([edit]) == edits_digest([dataclasses.replace(edit, why="other", upstream="#1")])
    for field in ("file", "find", "replacement"):
        assert edits_digest([edit]) != edits_digest([dataclasses.replace(edit, **{field: "z"})])


def test_the_documented_table_has_the_same_edits():
    section = DOCS.read_text().split("## The edits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert rows == [(edit.name, edit.file, edit.why, edit.upstream) for edit in EDITS]


def test_every_edit_says_why_and_names_an_upstream_thread_or_none():
    for edit in EDITS:
        assert edit.why, edit.name
        assert re.search(r"none found|[\w.-]+/[\w.-]+#\d+", edit.upstream), edit.name


def test_the_record_file_is_the_one_that_cmake_reads():
    assert f"/{texts.RECORD_FILE}" in texts.METADATA_NEW


@pytest.mark.parametrize(
    ("extension", "question", "answer"),
    [
        ("tensorflow", "built with MPI", True),
        ("tensorflow", "built with NCCL", False),
        ("torch", "built", True),
        ("tensorflow", "built", False),
        ("torch", "running with GPU", None),
    ],
)
def test_horovodrun_reads_what_was_built(tmp_path, extension, question, answer):
    metadata = {"pytorch": "2.13.0", "have_mpi": True, "have_gloo": True, "have_nccl": False}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    names: dict = {"__file__": str(tmp_path / "common" / "util.py")}
    exec("import json, os\n" + texts.RECORDED, names)
    assert names["_recorded"](extension, question) is answer
    (tmp_path / "metadata.json").unlink()
    assert names["_recorded"](extension, question) is None


# What stands between the edited parts of safe_shell_exec.py.
BEFORE_TERMINATE = """\
    try:
        p = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return

"""
BETWEEN = """
    for child in alive:
        try:
            for grandchild in child.children(recursive=True):
                try:
                    grandchild.kill()
                except psutil.NoSuchProcess:
                    pass
            child.kill()
        except psutil.NoSuchProcess:
            pass

"""
MIDDLEMAN = "def _exec_middleman(command, env, stdout_w, stderr_w, r, stdin_data=None):\n"
MIDDLEMAN_END = "    sys.exit(executor_shell.wait() % 256)\n\n\n"
EXECUTE = "def execute(w, middleman, index, events):\n    stop = threading.Event()\n"
SHELL_PARTS = (
    ending.GRACE_OLD, BEFORE_TERMINATE, ending.TERMINATE_OLD, BETWEEN, ending.KILL_OLD, "\n\n", MIDDLEMAN,
    ending.MIDDLEMAN_OLD, ending.PARENT_OLD, MIDDLEMAN_END, ending.PIPES_OLD, "    pass\n\n\n", EXECUTE,
    ending.EVENTS_OLD, ending.JOINED_OLD.replace("    stdout_fwd.join()\n", ""),
)  # fmt: skip
IMPORTS = "import os, signal, subprocess, sys, threading, time\nimport psutil\n"
THREADS = """
def in_thread(target, args=()):
    threading.Thread(target=target, args=args, daemon=True).start()

"""
SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def edited(text: str, file: str) -> str:
    """Give a text of Horovod's as the edits of a file leave it."""
    for edit in EDITS:
        if edit.file.endswith(file) and edit.find in text:
            assert text.count(edit.find) == 1
            text = text.replace(edit.find, edit.replacement)
    return text


def launcher_part() -> dict:
    """Give the launcher's functions as the edits leave them."""
    names: dict = {}
    exec(IMPORTS + THREADS + edited("".join(SHELL_PARTS), "safe_shell_exec.py"), names)
    return names


def terminate(pid: int, grace_seconds: float) -> None:
    """Runs the launcher's function as the edits leave it."""
    launcher_part()["terminate_executor_shell_and_children"](pid, grace_s=grace_seconds)


@pytest.fixture
def worker(tmp_path):
    """Starts a worker as the launcher does, under /bin/sh, and ends it after the test."""
    started = []

    def start(script: str, shell: str) -> subprocess.Popen:
        path = tmp_path / "worker.py"
        path.write_text(script)
        command = shell.format(command=f"{sys.executable} {path}")
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        for left in (*psutil.Process().children(recursive=True),):
            left.kill()
        process.wait()
        process.stdout.close()


# `: ; command` keeps the shell there in every shell; `exec` replaces it, as bash does unasked.
SHELLS = pytest.mark.parametrize("shell", ["{command}; exit $?", "exec {command}"], ids=["stays", "replaced"])


@SHELLS
def test_a_worker_gets_sigterm_and_its_exit_code_is_kept(worker, shell):
    process = worker(SAVES, shell)
    terminate(process.pid, grace_seconds=30)
    assert process.stdout.readline() == "saved\n"
    assert process.wait(timeout=30) == 75


@SHELLS
def test_a_worker_that_ignores_sigterm_is_killed_when_the_grace_is_over(worker, shell):
    process = worker(IGNORES, shell)
    children = psutil.Process(process.pid).children()
    terminate(process.pid, grace_seconds=0.2)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize(("given", "asked", "failed"), [(None, 30, 5), ("2.5", 2.5, 2.5)])
def test_the_grace_time_is_longer_where_somebody_asked_unless_it_is_set(monkeypatch, given, asked, failed):
    monkeypatch.delenv("HOROVOD_GRACEFUL_TERMINATION_SECONDS", raising=False)
    if given:
        monkeypatch.setenv("HOROVOD_GRACEFUL_TERMINATION_SECONDS", given)
    names = launcher_part()
    assert (names["GRACEFUL_TERMINATION_TIME_S"], names["FAILURE_TERMINATION_TIME_S"]) == (asked, failed)


TELLS = """
import signal, sys, time
def tell(number, _):
    print(signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1:
        sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, tell)
print("up", flush=True)
time.sleep(60)
"""


@SHELLS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_middleman_passes_on_what_was_asked(worker, shell, number):
    process = worker(TELLS, shell)
    names = launcher_part()
    names["_pass_signal_on"](process.pid, signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    names["_pass_signal_on"](process.pid, number)
    assert process.stdout.readline() == f"{number.name}\n"
    assert process.wait(timeout=30) == 75


def test_an_ssh_client_is_not_signalled_before_the_grace_is_over(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(ssh), "60"])
    names = launcher_part()
    names["GRACEFUL_TERMINATION_TIME_S"] = 0.2
    names["_pass_signal_on"](process.pid, signal.SIGUSR1)
    assert process.poll() is None
    names["_pass_signal_on"](process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGKILL


MIDDLEMAN_RUNS = """
def on_event(*args, **options):
    pass


class Pipe:
    def fileno(self):
        return 0


_exec_middleman("exec {python} {worker}", None, None, None, Pipe())
"""


@pytest.fixture
def middleman(tmp_path):
    """Starts a middleman, with the pipe of its orders for standard input, and a worker under it."""
    started = []

    def start(script: str) -> subprocess.Popen:
        (tmp_path / "worker.py").write_text(script)
        runs = MIDDLEMAN_RUNS.format(python=sys.executable, worker=tmp_path / "worker.py")
        text = IMPORTS + THREADS + edited("".join(SHELL_PARTS), "safe_shell_exec.py") + runs
        (tmp_path / "middleman.py").write_text(text)
        command = [sys.executable, str(tmp_path / "middleman.py")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        for left in psutil.Process().children(recursive=True):
            left.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_middleman_follows_its_orders(middleman):
    process = middleman(TELLS)
    process.stdin.write(bytes([signal.SIGUSR1]))
    assert process.stdout.readline() == b"SIGUSR1\n"
    process.stdin.write(bytes([signal.SIGTERM]))
    assert process.stdout.readline() == b"SIGTERM\n"
    assert process.wait(timeout=30) == 75


def test_a_middleman_whose_launcher_is_gone_ends_its_worker(middleman):
    process = middleman(TELLS)
    process.stdin.close()
    assert process.stdout.readline() == b"SIGTERM\n"
    assert process.wait(timeout=30) == 75


def test_a_middleman_outlives_a_signal_to_every_process(middleman):
    process = middleman(TELLS)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.2)
    assert process.poll() is None
    psutil.Process(process.pid).children()[0].terminate()
    assert process.wait(timeout=30) == 75


RUNS_MPIRUN = """
import copy, ctypes, os, signal, subprocess, sys, threading, time
import psutil
class safe_shell_exec:
    GRACEFUL_TERMINATION_TIME_S = {grace}
if {without_prctl}:
    ctypes.CDLL = lambda name: object()
{function}    pass
sys.exit(_run_and_pass_signals_on({command!r}, None))
"""
STAYS = """
import os, signal, sys, time
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: print(signal.Signals(number).name, flush=True))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def horovodrun(tmp_path):
    """Starts the part of horovodrun that runs mpirun, here another script; gives both processes."""
    found = []

    def start(script: str, grace: float = 30, without_prctl: bool = False, **options: object):
        (tmp_path / "mpirun.py").write_text(script)
        command = f"{sys.executable} {tmp_path / 'mpirun.py'}"
        text = RUNS_MPIRUN.format(
            grace=grace, without_prctl=without_prctl, function=launcher.MPIRUN_FUNCTION, command=command
        )
        (tmp_path / "horovodrun.py").write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "horovodrun.py")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        line = process.stdout.readline()
        mpirun = psutil.Process(int(line)) if line.strip().isdecimal() else None
        found.append((process, mpirun))
        return process, mpirun

    yield start
    for process, mpirun in found:
        for left in (process, mpirun):
            if left is not None:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    left.kill()
        process.wait()
        process.stdout.close()


MPIRUN = TELLS.replace('print("up"', "import os; print(os.getpid()")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2], ids=lambda n: n.name)
def test_a_request_to_stop_reaches_mpirun_as_sigusr2_and_its_exit_code_is_kept(horovodrun, number):
    process, _ = horovodrun(MPIRUN)
    process.send_signal(number)
    assert process.stdout.readline() == "SIGUSR2\n"
    assert process.wait(timeout=30) == 75


def test_sigusr1_reaches_mpirun_and_ends_nothing(horovodrun):
    process, _ = horovodrun(MPIRUN)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75


def test_an_mpirun_that_does_not_end_in_time_gets_sigterm(horovodrun):
    process, _ = horovodrun(STAYS, grace=0.2)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGUSR2\n"
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_sigint_reaches_mpirun_where_there_is_no_terminal(horovodrun):
    process, _ = horovodrun(STAYS.replace("signal.SIGUSR1,", "signal.SIGUSR1, signal.SIGINT,"))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"


def test_a_hangup_is_ignored_under_nohup(horovodrun):
    process, _ = horovodrun(STAYS, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"


@pytest.mark.parametrize("without_prctl", [False, True])
def test_an_mpirun_whose_horovodrun_is_killed_ends(horovodrun, without_prctl):
    if not without_prctl and not hasattr(ctypes.CDLL(None), "prctl"):
        pytest.skip("this C library has no prctl")
    process, mpirun = horovodrun(STAYS, without_prctl=without_prctl)
    wait_until_it_sleeps(process)
    process.kill()
    assert not psutil.wait_procs([mpirun], timeout=30)[1]


def wait_until_it_sleeps(process: subprocess.Popen) -> None:
    """Wait until horovodrun does nothing but wait for mpirun."""
    deadline = time.monotonic() + 0.5
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING or time.monotonic() < deadline:
        time.sleep(0.02)


def test_an_mpirun_that_sigusr2_kills_counts_as_stopped_by_the_signal_that_came(horovodrun):
    process, _ = horovodrun("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_mpiruns_exit_code_and_streams_are_its_own(horovodrun):
    process, _ = horovodrun("import sys; print(sys.stdin.read()); sys.exit(3)", stdin=subprocess.DEVNULL)
    assert process.wait(timeout=30) == 3
