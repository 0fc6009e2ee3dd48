"""Sending a run to Weights & Biases, whose own process queues and sends what it is given.

W&B refuses a step of its own that is less than the one before. So its steps count lines, and the step of
training is a number in each line, which its charts take as their axis.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_TRAINING, EnvironmentFault
from hvdtrain.reporting.stored_runs import COMPLETED, FAILED, UNSAVED
from hvdtrain.trackers.tracker import Row, TrackedRun

_EXIT_CODES = {COMPLETED: EXIT_DONE, FAILED: EXIT_TRAINING, UNSAVED: EXIT_ENVIRONMENT}
_KILLED = 255  # any other end: what W&B's library sends after Ctrl-C; other codes are shown as failures
WAIT_SECONDS = 10.0  # for its server, in init() and in finish(), which the library also calls at exit


class WandbTracker:
    """Sends a run to the project that WANDB_PROJECT names, or to a folder with WANDB_MODE=offline.

    Args:
        note: shows a line of text to the user.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._run: Any = None
        self._after: dict[str, int] = {}
        self._note = note

    def open(self, run: TrackedRun) -> str:
        """Begin or resume the run whose id is the run's name among trackers; send its config and facts."""
        settings = self._wandb.Settings(
            reinit="create_new",  # the task may have a run of its own
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            init_timeout=WAIT_SECONDS, finish_timeout=WAIT_SECONDS, finish_timeout_raises=True,
            x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run = self._wandb.init(
                id=run.id,
                name=os.environ.get("WANDB_NAME") or run.folder.resolve().name,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(run.folder),
                settings=settings,
            )
        except self._wandb.errors.UsageError as error:  # no key, for instance
            remedy = "Log in once with `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
            raise EnvironmentFault(str(error).rstrip("."), remedy) from error
        except Exception:  # its process keeps the run, and would refuse to begin it again
            if self._wandb.run is None:  # the task has none that this would end
                self._wandb.teardown()
            raise
        self._after = {"resumed_after": run.facts["step"]} if run.resumed else {}
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.config.update({**run.config, "hvdtrain": dict(run.facts)}, allow_val_change=True)
        if run.resumed:
            before = [text for text in self._run.config.get("resumed") or [] if text != run.resumed]
            self._run.config.update({"resumed": [*before, run.resumed]}, allow_val_change=True)
        if self._run.offline:
            self._note(f"it is offline; later: wandb sync {self._folder.with_name(f'*-{self._run.id}')}")
            return f"{self._run.id} of {self._run.project}, offline"
        return str(self._run.url)

    def send(self, rows: Sequence[Row]) -> None:
        """Hand lines to the library, which writes them to its file at once."""
        for row in rows:
            values = {**row.values, **self._after, "step": row.step}
            self._run.log({**values, "_timestamp": row.seconds})

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint as an artifact of the type "model"."""
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        artifact.metadata["name"] = folder.name
        self._run.log_artifact(artifact, aliases=["latest", folder.name])

    def end(self, status: str, error: str) -> None:
        """Send how the run ended, and wait some seconds for the library to send what it has."""
        ending = {"hvdtrain/status": status, "hvdtrain/error": error}
        self._run.summary.update({name: text for name, text in ending.items() if text})
        folder = self._folder
        try:
            self._run.finish(exit_code=_EXIT_CODES.get(status, _KILLED))
        except TimeoutError:
            self._note(f"its server has not taken all of this run; to send the rest: wandb sync {folder}")

    @property
    def _folder(self) -> Path:
        return Path(self._run.dir).parent
