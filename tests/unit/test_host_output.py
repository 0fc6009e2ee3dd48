"""Output that a job outlives, and the end of a process that has threads left."""

import signal
import subprocess
import sys
import tempfile
import time

from hvdtrain.host.processes import run_limited


def python(code: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=300, check=False, **options
    )


FATAL = """
import os, signal, click
from hvdtrain.config.options import JobCommand
JobCommand("train", callback=lambda: os.kill(os.getpid(), signal.SIGBUS))()
"""


def test_a_signal_of_the_kernel_leaves_the_line_that_it_came_in():
    done = python(FATAL, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGBUS
    assert b"Fatal Python error: Bus error" in done.stderr
    assert b'File "<string>", line 4' in done.stderr


TOLERANT = "from hvdtrain.host.output import make_output_tolerant\nmake_output_tolerant()\n"


def test_a_full_disk_does_not_end_a_process_and_is_said_once():
    with open("/dev/full", "w") as full:
        done = python(TOLERANT + "for _ in range(3): print('x' * 9000)", stdout=full)
    assert done.returncode == 0
    said = done.stderr.decode()
    assert said.count("note: cannot write to standard output: No space left on device") == 1
    assert "Traceback" not in said


ENDS = """
import atexit, sys, threading, time
from hvdtrain.host.start_reports import limit_wait_for_threads
atexit.register(lambda: print("handler"))
threading.Thread(target=time.sleep, args=({seconds},), name="left behind").start()
{more}
print("done")
limit_wait_for_threads({limit})
"""


# as Python 3.12.0 refuses it while it waits for threads
NO_THREADS = """
start = threading.Thread.start
def refuse(thread):
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)
threading.Thread.start = refuse
"""


def test_a_thread_that_is_left_keeps_a_process_for_seconds_only():
    since = time.monotonic()
    done = python(ENDS.format(seconds=500, limit=0.5, more=NO_THREADS), stdout=subprocess.PIPE)
    assert time.monotonic() - since < 200
    assert (done.returncode, done.stdout.split()) == (0, [b"done", b"handler"])
    assert b"still running: left behind." in done.stderr


def test_a_thread_that_ends_while_the_process_gives_up_runs_no_handler_twice():
    slow = "atexit.register(lambda: (print('slow', flush=True), time.sleep(1.5)))"
    done = python(ENDS.format(seconds=1.0, limit=0.5, more=slow), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout.split()) == (0, [b"done", b"slow", b"handler"])


def test_output_of_a_command_needs_no_room_on_a_disk(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/none")
    done = run_limited(["sh", "-c", "echo output; echo errors >&2; exit 3"], 60)
    assert (done.code, done.output, done.errors, done.is_cut) == (3, "output\n", "errors\n", False)


def test_a_process_that_is_started_has_the_standard_files_that_were_closed():
    child = "import os; os.fstat(2)"
    code = (
        "import subprocess, sys; from hvdtrain.host.output import open_closed_files; open_closed_files(); "
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    assert subprocess.call(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]) == 0
