"""Running elastic jobs from tests, disturbing them, and checking that nothing was lost."""

import json
import time
from pathlib import Path

from hvdtrain.reporting.stored_runs import read_records
from hvdtrain.tools.drill.task import History, differences
from support.jobs import LIMIT_SECONDS, started

TASKS = Path(__file__).parents[1] / "faults" / "elastic_tasks.py"
STATE = "elastic-state.json"
HOLD = "hold"  # as in the task


class ElasticJob(started):
    """Context with a running elastic job; its run directory is ``run`` in its folder.

    ``hosts`` and ``launch`` are words for horovodrun; by default, this machine has a slot for each worker.
    """

    def __init__(
        self,
        framework: str,
        folder: Path,
        *options: str,
        workers: int = 3,
        least: int = 1,
        most: int | None = None,
        hosts: tuple[str, ...] = (),
        launch: tuple[str, ...] = (),
        **changes: str,
    ) -> None:
        hosts = hosts or ("-H", f"localhost:{workers}")
        limits = ["-np", str(workers), "--min-np", str(least)]
        if most:
            limits += ["--max-np", str(most)]
        self.folder, self.run_dir = folder, folder / "run"
        training = ["python", "-m", "hvdtrain", "--framework", framework, "--task", f"{TASKS}:Steady"]
        super().__init__(
            ["horovodrun", *limits, *hosts, *launch, *training, "--run-dir", "run", *options],
            folder,
            **{
                "HVDTRAIN_ELASTIC_STATE": str(folder / STATE),
                "HOROVOD_START_TIMEOUT": str(LIMIT_SECONDS),  # all workers are in the first world
                **changes,
            },
        )

    def members(self) -> dict[int, int]:
        """Give the process of each rank of the world that there is."""
        for _ in range(50):
            try:
                members = json.loads((self.folder / STATE).read_text())["members"]
            except (FileNotFoundError, ValueError):
                time.sleep(0.1)
            else:
                return {one["rank"]: one["pid"] for one in members}
        return {}

    def step(self) -> int:
        """Give the last step that is logged."""
        return max(
            (line["step"] for line in read_records(self.run_dir) if line["phase"] == "train"), default=0
        )

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.until(lambda: self.step() >= step)

    def wait_for_workers(self, workers: int) -> None:
        """Wait until there are so many workers and they train; until then, steps are slow."""
        self.hold()
        self.until(lambda: len(self.members()) == workers)
        (self.folder / HOLD).unlink()
        self.wait_for_step(self.step() + 2)

    def hold(self) -> None:
        """Let each step take a second, so that the job does not end before what a test waits for."""
        (self.folder / HOLD).touch()


def check_nothing_lost(run_dir: Path, undisturbed: Path) -> None:
    """Check that a run saw every sample once per epoch and went as the undisturbed one did."""
    found, expected = History.of(run_dir), History.of(undisturbed)
    assert differences(found, expected) == []
    rates = [
        [line["learning_rate"] for line in of.lines if line["phase"] == "train"] for of in (found, expected)
    ]
    assert rates[0] == rates[1]
    assert found.summary["final"].keys() == expected.summary["final"].keys()
    changes = [line for line in events(run_dir) if line["event"] == "changed"]
    assert found.summary.get("changes", 0) == len(changes)
    paused = sum(line["pause_seconds"] for line in changes)
    # the worker that wrote a line may be lost: then the sum has the pause by the clock of the next rank 0
    assert abs(found.summary.get("paused_seconds", 0) - paused) <= 0.5 * len(changes)


def events(run_dir: Path) -> list[dict]:
    """Give the changes of a run's workers."""
    return [line for line in read_records(run_dir) if line["phase"] == "event"]
