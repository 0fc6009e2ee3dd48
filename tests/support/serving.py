"""What the tests of evaluate, export and import share: trained runs, and several commands in one process."""

import functools
import json
import tempfile
from pathlib import Path

from jobs import Run, run, shared_run

# a framework's commands run in one process: starting one takes longer than they do
_RUNNER = Path(__file__).parent / "parallel" / "job_commands.py"


def trained(framework: str) -> Run:
    """Train digits for two epochs, once per framework."""
    return shared_run(1, "none", "--framework", framework, "--epochs", "2", "--device", "cpu")


def newest(run: Run) -> Path:
    return Path(run.summary["checkpoint"])


def last_eval(run: Run) -> dict:
    """Give the last line of an evaluation that training wrote itself."""
    return [line for line in run.metrics if line["phase"] == "eval"][-1]


def hvdtrain(*commands: list[str], cwd: Path) -> list[tuple[str, str]]:
    """Run commands of hvdtrain one after the other; give what each printed, and its error or nothing."""
    result = run(["python", str(_RUNNER), json.dumps(commands)], cwd)
    assert result.returncode == 0, result.output[-5000:]
    lines = [
        line.removeprefix("RESULT ") for line in result.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert len(lines) == len(commands)
    rest = [line for line in result.output.splitlines() if not line.startswith("RESULT ")]
    assert rest == [], "something chattered"
    return [tuple(json.loads(line)) for line in lines]


@functools.cache
def exports(forms: tuple[str, ...]) -> dict[tuple[str, str], tuple[str, str]]:
    """Export the runs of both frameworks; give what was printed and the error, by run and form."""
    folder = Path(tempfile.mkdtemp(dir=trained("torch").folder))
    keys = [(framework, form) for framework in ("torch", "tf") for form in forms]
    commands = [["export", str(trained(framework).folder), "--to", form] for framework, form in keys]
    return dict(zip(keys, hvdtrain(*commands, cwd=folder), strict=True))
