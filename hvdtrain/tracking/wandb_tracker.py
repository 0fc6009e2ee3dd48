"""Sending a run to Weights & Biases.

W&B refuses a step of its own that is less than the one before. So its steps count lines, and the step of
training is a number in each line, which its charts take as their axis.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_TRAINING
from hvdtrain.reporting.run_status import COMPLETED, FAILED, UNSAVED
from hvdtrain.tracking.rows import Row
from hvdtrain.tracking.state import SenderState
from hvdtrain.tracking.tracker import PermanentError, TrackedRun

_EXIT_CODES = {COMPLETED: EXIT_DONE, FAILED: EXIT_TRAINING, UNSAVED: EXIT_ENVIRONMENT}
_KILLED = 255  # any other end: what W&B's library sends after Ctrl-C; other codes are shown as failures
_INIT_SECONDS = 30.0


class WandbTracker:
    """Sends a run to the project that WANDB_PROJECT names, or to a folder with WANDB_MODE=offline."""

    ends_last = True

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None
        self._state = SenderState()
        self.notes: list[str] = []

    def open(self, run: TrackedRun, state: SenderState) -> bool:
        """Begin or resume the run whose id is the run's name among trackers."""
        settings = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False,
            init_timeout=_INIT_SECONDS, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run = self._wandb.init(
                id=run.tracking_id,
                name=os.environ.get("WANDB_NAME") or run.name,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(run.folder),
                settings=settings,
            )
        except self._wandb.errors.UsageError as error:  # no key, for instance
            remedy = "Log in once with `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            raise PermanentError(f"{str(error).rstrip('.')}. {remedy}") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.config.update(dict(run.config), allow_val_change=True)
        target = f"{self._run.entity or ''}/{self._run.project or ''}"
        is_known = (state.target, state.run) in (("", ""), (target, self._run.id))
        if not is_known:
            state.last_step = -1
        state.target, state.run = target, self._run.id
        state.url = self._run.url or ""
        folder = str(Path(self._run.dir).parent)
        state.unfinished = [*(one for one in state.unfinished if one != folder), folder]
        state.sending = "" if self._run.offline else folder
        self._state = state
        return is_known

    def is_up_to_date(self, state: SenderState) -> bool:
        """Return whether it would go to the same project offline, where each opening makes a folder."""
        if os.environ.get("WANDB_MODE") != "offline" or not state.unfinished:
            return False
        entity, _, project = state.target.partition("/")
        wanted = os.environ.get("WANDB_ENTITY", entity), os.environ.get("WANDB_PROJECT", project)
        return wanted == (entity, project) and Path(state.unfinished[-1]).is_dir()

    def start(self, start: Mapping[str, Any], number: int) -> None:
        """Send a job's facts as a part of the config; of one that resumes, also what differs."""
        config = self._run.config
        facts = {name: value for name, value in start.items() if name not in ("time", "seconds")}
        config.update({"hvdtrain": facts}, allow_val_change=True)
        if start["step"] or number:
            changes = "; ".join(map(str, start.get("changes") or [])) or "nothing changed"
            self._add_to_list("resumed", f"after step {start['step']}: {changes}")

    def send(self, rows: Sequence[Row]) -> None:
        """Hand lines to the library, which writes them to its file at once."""
        for row in rows:
            values = {**row.values, **row.axes, "step": row.step, "attempt": row.job}
            self._run.log({**values, "_timestamp": row.seconds})
            if row.event:
                self._add_to_list("workers_changed", row.event)

    def repeat(self, first: int, last: int) -> None:
        """Say in the config which steps come twice."""
        self._add_to_list("repeated_steps", f"{first}-{last}")

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint as an artifact of the type "model"."""
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        artifact.add_dir(str(folder))
        artifact.metadata["name"] = folder.name
        self._run.log_artifact(artifact, aliases=["latest", folder.name])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send how the run ended, and wait for the library to send what it has."""
        self._run.summary["hvdtrain/status"] = status
        if summary.get("error"):
            self._run.summary["hvdtrain/error"] = str(summary["error"])
        folder, is_offline = str(Path(self._run.dir).parent), self._run.offline
        self._run.finish(exit_code=_EXIT_CODES.get(status, _KILLED))
        if not is_offline:
            self._state.unfinished = [one for one in self._state.unfinished if one != folder]
            self._state.sending = ""

    def _add_to_list(self, name: str, text: str) -> None:
        before = list(self._run.config.get(name) or [])
        self._run.config.update({name: [*before, text]}, allow_val_change=True)
