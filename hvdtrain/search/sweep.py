"""Running a sweep: its trials are jobs of their own, side by side or one after the other."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hvdtrain.bench.launch import horovodrun, write_specification
from hvdtrain.bench.worker import layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import (
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_TRAINING,
    EXIT_USAGE,
    EnvironmentFault,
    UsageError,
)
from hvdtrain.jobs.signals import interruptible
from hvdtrain.reporting.lock_state import LOCK_FILE, close_lock, open_lock, take_lock
from hvdtrain.search.children import Child, end_children, python_command
from hvdtrain.search.pruning import PRUNED
from hvdtrain.search.side_by_side import VISIBLE
from hvdtrain.search.space import config_values
from hvdtrain.search.study import StudyFault, SweepStudy, is_number, study_faults
from hvdtrain.search.sweep_plan import SweepPlan
from hvdtrain.search.trial_run import has_trained, run_directory, summary_of, wait_until_free
from hvdtrain.words import counted

_POLL_SECONDS = 0.1
_MOST_ERRORS = 3  # in a row, before training
_JOBS = "jobs"


@dataclass
class Sweep:
    """A sweep that runs.

    Attributes:
        plan: what it does.
        study: its trials.
        say: is called with what is going on.
        errors: trials in a row that ended before they trained.
    """

    plan: SweepPlan
    study: SweepStudy
    say: Callable[[str], None]
    errors: int = 0
    _waiting: list[FrozenTrial] = field(default_factory=list)
    _running: dict[int, tuple[FrozenTrial, Child]] = field(default_factory=dict)  # by slot

    def run(self) -> None:
        """Run trials until there are as many as there should be.

        Raises:
            UsageError: If three trials in a row end before they train.
            StudyFault: If the study can no longer be read or written; trials that run end first.
            Interrupted: If a signal comes: trials that run save their state and end.
        """
        try:
            with study_faults(self.plan):
                self._run()
        except StudyFault:  # which never ends a trial
            if self._running:
                self.say(f"the study cannot be written; waiting for {counted(len(self._running), 'trial')}")
            while any(child.code() is None for _, child in self._running.values()):
                time.sleep(_POLL_SECONDS)
            for _, child in self._running.values():
                child.close()
            self._running.clear()
            raise
        finally:
            if self._running:
                self.say(f"ending {counted(len(self._running), 'trial')}: first they save their state")
            end_children([child for _, child in self._running.values()])
            with suppress(StudyFault), study_faults(self.plan):
                for trial, _ in self._running.values():
                    self._is_over(trial)

    def _run(self) -> None:
        self._waiting = [one for one in self.study.interrupted() if not self._is_over(one)]
        for one in self._waiting:
            self.say(f"trial {one.number} continues: it had not ended")
        while True:
            self._settle_ended()
            while len(self._running) < self.plan.parallel and (trial := self._next()) is not None:
                self._start(trial)
            if not self._running:
                return
            time.sleep(_POLL_SECONDS)

    def _next(self) -> FrozenTrial | None:
        return self._waiting.pop(0) if self._waiting else self.study.next()

    def _start(self, trial: FrozenTrial) -> None:
        plan, attempt = self.plan, self.study.attempt(trial)
        if attempt > 1:
            wait_until_free(run_directory(plan.folder, trial.number))
        slot = next(slot for slot in range(plan.parallel) if slot not in self._running)
        path = plan.folder / _JOBS / f"trial-{trial.number:04d}.json"
        own = config_values(plan.space, trial.params)
        place = {"run_dir": str(run_directory(plan.folder.resolve(), trial.number)), "resume": "auto"}
        threads = [] if plan.threads is None else [Layer("--parallel", {"threads": plan.threads})]
        layers = [*threads, *plan.layers, Layer("space", own), Layer("sweep", place)]
        write_specification(
            path,
            {
                "layers": layers_to_json(layers),
                "folder": str(plan.folder.resolve()),
                "storage": plan.storage,
                "pruner": plan.pruner,
                "number": trial.number,
                "metric": str(plan.goal),
            },
        )
        launcher = horovodrun(plan.workers, plan.hosts, plan.controller)
        command = [*launcher, *python_command("hvdtrain.search.trial_worker"), str(path)]
        again = f", attempt {attempt}" if attempt > 1 else ""
        self.say(f"trial {trial.number}: {in_words(trial.params)}{again}")
        child = Child(command, path.with_suffix(".log"), self._devices(slot))
        self._running[slot] = trial, child

    def _devices(self, slot: int) -> dict[str, str]:
        """Return the environment that gives a trial GPUs of its own, if trials share this host's."""
        first = slot * self.plan.workers
        devices = ",".join(self.plan.gpus[first : first + self.plan.workers])
        return {VISIBLE: devices} if devices else {}

    def _settle_ended(self) -> None:
        for slot, (trial, child) in list(self._running.items()):
            code = child.code()
            if code is None:
                continue
            child.close()
            del self._running[slot]
            self._settle(trial, child, code)

    def _settle(self, trial: FrozenTrial, child: Child, code: int) -> None:
        """Keep how a trial ended.

        Raises:
            UsageError: If it is the third in a row that ended before it trained.
        """
        if code == EXIT_DONE and self._is_over(trial):
            self.errors = 0
            return
        reason = _reason(child.last_lines(), code)
        trained = has_trained(run_directory(self.plan.folder, trial.number))
        if code in (EXIT_USAGE, EXIT_ENVIRONMENT) and not trained:
            self._fail(trial, reason)
            self.errors += 1
            if self.errors >= _MOST_ERRORS:
                raise UsageError(
                    f"{_MOST_ERRORS} trials in a row ended before they trained; the last one: {reason}",
                    f"{child.log} has all of its output. The trials that ended well are kept.",
                )
            return
        self.errors = 0
        if code in (EXIT_DONE, EXIT_USAGE, EXIT_TRAINING) or self.study.died(trial.number):
            self._fail(trial, reason)
        else:  # a signal, lack of memory, a worker or a disk that was lost: what it saved is not lost
            self.say(f"trial {trial.number} ended ({reason}) and continues from its newest checkpoint")
            self._waiting.append(trial)

    def _is_over(self, trial: FrozenTrial) -> bool:
        """Keep the result of a trial that completed; return whether it has one."""
        summary = summary_of(run_directory(self.plan.folder, trial.number))
        status = summary.get("status")
        if status != "completed" and (status != "unsaved" or "error" in summary):  # which says why it stopped
            return False
        metric, value = self.plan.goal.metric, summary.get("final", {}).get(self.plan.goal.metric)
        notes = {"seconds": summary["seconds"], "steps": summary["steps"]}
        early = str(summary.get("stopped_early", ""))
        if not is_number(value):
            given = ", ".join(summary.get("final", {})) or "nothing"
            found = f"is {value}" if value is not None else f"is missing; the evaluation gives {given}"
            self._fail(trial, f"{metric} {found}")
        elif f": {PRUNED}: " in early:
            self.study.prune(trial.number, {**notes, "reason": early.partition(f": {PRUNED}: ")[2]})
            self.say(f"trial {trial.number} {PRUNED}: {metric} {value:.4g}")
        else:
            self.study.complete(trial.number, float(value), notes)
            self.say(f"trial {trial.number}: {metric} {value:.4g} after {summary['seconds']:.0f} s")
        return True

    def _fail(self, trial: FrozenTrial, reason: str) -> None:
        self.study.fail(trial.number, reason)
        self.say(f"trial {trial.number} failed: {reason}")


def run_sweep(plan: SweepPlan, say: Callable[[str], None]) -> SweepStudy:
    """Run a sweep, or continue it, and return its study.

    Args:
        plan: what it does.
        say: is called with what is going on.

    Raises:
        UsageError: If its folder has another sweep, or three trials in a row end before they train.
        EnvironmentFault: If its folder cannot be written, or another process works in it.
        Interrupted: If a signal comes. What has ended is kept, and the same command continues.
    """
    with interruptible(), _locked(plan.folder):
        study = SweepStudy(plan)
        with study_faults(plan):
            before = len(study.trials)
        if before:
            say(f"{plan.folder}: {before} of {plan.trials} trials have begun already")
        Sweep(plan, study, say).run()
    return study


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Return a context in which no other process works in a sweep's folder.

    Raises:
        EnvironmentFault: If another one does, or the folder cannot be written.
    """
    try:
        (folder / _JOBS).mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / LOCK_FILE)
    except OSError as error:
        raise EnvironmentFault(f"cannot make the sweep's folder: {error}") from None
    try:
        if (reason := take_lock(file)) is not None:
            raise EnvironmentFault(
                f"{folder} is in use by another sweep, or cannot be locked: {reason.strerror or reason}",
                "Wait until it has ended, or give another --folder.",
            )
        yield
    finally:
        close_lock(file)


def in_words(params: dict[str, Any]) -> str:
    """Return the values of a trial as a line."""
    parts = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in params.values())
    return ", ".join(f"{name}={part}" for name, part in zip(params, parts, strict=True))


def _reason(text: str, code: int) -> str:
    """Return why a job ended: what it said of it, or its exit code."""
    said = [line.partition("hvdtrain: ")[2] for line in text.splitlines() if "hvdtrain: " in line]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return said[-1] if said else how
