"""What the tests of evaluate, export and import share: trained runs, and commands of hvdtrain."""

import functools
import tempfile
from pathlib import Path

from support.jobs import Run
from support.pool import Key, call, shared_run


def trained(framework: str) -> Run:
    """Train digits for two epochs, once per framework."""
    return shared_run(1, "none", "--framework", framework, "--epochs", "2", "--device", "cpu")


def newest(run: Run) -> Path:
    return Path(run.summary["checkpoint"])


def last_eval(run: Run) -> dict:
    """Return the last line of an evaluation that training wrote itself."""
    return [line for line in run.metrics if line["phase"] == "eval"][-1]


def hvdtrain(*commands: list[str], cwd: Path, framework: str) -> list[tuple[str, str]]:
    """Run commands in a process of one framework; return what each printed, and its error or nothing."""
    done = call(Key(framework, "none", 1), "support.cases:commands", cwd, commands=commands)
    assert done.stdout + done.stderr == "", "something chattered"
    return [tuple(result) for result in done.values[0]]


@functools.cache
def exports(forms: tuple[str, ...]) -> dict[tuple[str, str], tuple[str, str]]:
    """Export the runs of both frameworks; return what was printed and the error, by run and form."""
    folder = Path(tempfile.mkdtemp(dir=trained("torch").folder))
    keys = [(framework, form) for framework in ("torch", "tf") for form in forms]
    commands = [["export", str(trained(framework).folder), "--to", form] for framework, form in keys]
    done = hvdtrain(*commands, cwd=folder, framework="tf" if "keras" in forms else "torch")
    return dict(zip(keys, done, strict=True))
