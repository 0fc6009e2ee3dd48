"""Running elastic jobs from tests, disturbing them, and checking that nothing was lost."""

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path

from support.jobs import started

TASKS = Path(__file__).parents[1] / "faults" / "elastic_tasks.py"
STATE = "elastic-state.json"
_TOLERANCE = 1e-5  # relative; that of the design for other numbers of workers


class ElasticJob(started):
    """Context with a running elastic job; its run directory is ``run`` in its folder.

    Args:
        framework: "torch" or "tf".
        folder: where it runs.
        options: of the training.
        workers: to start with.
        least: fewer wait.
        most: never more.
        hosts: words for horovodrun that say where; ``("--host-discovery-script", "./hosts.sh")``.
        changes: variables.
    """

    def __init__(
        self,
        framework: str,
        folder: Path,
        *options: str,
        workers: int = 3,
        least: int = 1,
        most: int | None = None,
        hosts: tuple[str, ...] = ("-H", "localhost:4"),
        launch: tuple[str, ...] = (),
        **changes: str,
    ) -> None:
        limits = ["-np", str(workers), "--min-np", str(least)]
        if most:
            limits += ["--max-np", str(most)]
        self.folder, self.run_dir = folder, folder / "run"
        training = ["python", "-m", "hvdtrain", "--framework", framework, "--task", f"{TASKS}:Steady"]
        super().__init__(
            ["horovodrun", *limits, *hosts, *launch, *training, "--run-dir", "run", *options],
            folder,
            **{"HVDTRAIN_ELASTIC_STATE": str(folder / STATE), **changes},
        )

    def members(self) -> dict[int, int]:
        """Give the process of each rank of the world that there is."""
        for _ in range(50):
            try:
                return {one["rank"]: one["pid"] for one in json.loads((self.folder / STATE).read_text())["members"]}
            except (FileNotFoundError, ValueError):
                time.sleep(0.1)
        return {}

    def step(self) -> int:
        """Give the last step that is logged."""
        return max((line["step"] for line in lines(self.run_dir) if line["phase"] == "train"), default=0)

    def wait_for_step(self, step: int, seconds: float = 60) -> None:
        """Wait until a step is logged.

        Raises:
            AssertionError: where it does not come in time, or the job has ended.
        """
        self.wait_until(lambda: self.step() >= step, f"step {step}", seconds)

    def wait_for_workers(self, workers: int, seconds: float = 60) -> None:
        """Wait until a step is logged that so many workers did."""

        def found() -> bool:
            trained = [line for line in lines(self.run_dir) if line["phase"] == "train"]
            return bool(trained) and len(self.members()) == workers

        self.wait_until(found, f"{workers} workers", seconds)

    def wait_until(self, condition, words: str, seconds: float = 60) -> None:
        """Wait for what the job is about to do."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll()
            late = time.monotonic() > deadline
            assert ended is None and not late, f"{words} did not come ({ended}):\n{self.result().output[-4000:]}"
            time.sleep(0.02)

    def send(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Send a signal to the worker of a rank; return its process."""
        pid = self.members()[rank]
        os.kill(pid, number)
        return pid


def lines(run_dir: Path) -> list[dict]:
    """Give the whole lines of a run's log."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_nothing_lost(run_dir: Path, undisturbed: Path) -> None:
    """Check that a run saw every sample once per epoch and ended as the undisturbed one did."""
    expected, found = lines(undisturbed), lines(run_dir)
    for phase in ("train", "eval"):
        steps = [[line["step"] for line in of if line["phase"] == phase] for of in (expected, found)]
        assert steps[1] == steps[0], f"{phase}: steps without a hole or a duplicate"
    losses = [[line["loss"] for line in of if line["phase"] == "train"] for of in (expected, found)]
    for step, (one, other) in enumerate(zip(*losses, strict=True), start=1):
        assert math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-7), f"step {step}: {one} and {other}"
    assert trained_indices(run_dir) == trained_indices(undisturbed)
    rates = [[line["learning_rate"] for line in of if line["phase"] == "train"] for of in (expected, found)]
    assert rates[0] == rates[1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", expected[-1]["step"])
    assert Path(summary["checkpoint"]).is_dir()


def trained_indices(run_dir: Path) -> dict[int, list[int]]:
    """Give the samples of each step, over all workers, sorted."""
    by_step: dict[int, Counter] = {}
    for path in (run_dir / "indices").iterdir():
        for text in path.read_text().splitlines():
            line = json.loads(text)
            by_step.setdefault(line["step"], Counter()).update(line["indices"])
    return {step: sorted(counts.elements()) for step, counts in sorted(by_step.items())}


def events(run_dir: Path) -> list[dict]:
    """Give the changes of a run's workers."""
    return [line for line in lines(run_dir) if line["phase"] == "event"]
