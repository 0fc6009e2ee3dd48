"""Trying settings of a job by short runs, and keeping those that make it faster."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.bench.spread import Spread
from hvdtrain.bench.tune_mpi import mpi_settings, variables_of
from hvdtrain.bench.tuning import Setting, Trial, Tuning
from hvdtrain.compression import LOW_RANK
from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, Interrupted
from hvdtrain.horovod_build import InstalledBuild
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.words import counted

REPEAT = 3  # pairs of runs for each setting
_LEAST_GAIN = 0.02  # of the step
_NEAR_LOSS = 0.05  # relative: a setting may round numbers, and not change what is trained
_CHANGES_CURVE = [("compression", f"{LOW_RANK}:4")]  # and is measured, but never kept


def settings_to_try(
    on_hosts: Sequence[int],
    build: InstalledBuild | None,
    given: Mapping[str, Any],
    controller: str | None = None,
) -> list[tuple[str, Any]]:
    """Return names and values of what is tried, in order.

    What the job has already is left out, and what means nothing for it.

    Args:
        on_hosts: how many workers each host has.
        build: how Horovod was built.
        given: the fields that the user set.
        controller: the user's choice; None for horovodrun's, which is MPI if there is.
    """
    workers, hosts = sum(on_hosts), len(on_hosts)
    found: list[tuple[str, Any]] = []
    if workers > 1 and build and build.mpi:
        is_open_mpi = build.mpi.startswith("Open MPI")
        by_nccl = build.nccl and given.get("device") != "cpu"
        of_mpi = mpi_settings(workers, hosts, os.environ) if is_open_mpi and not by_nccl else []
        other = [("controller", "mpi" if controller == "gloo" else "gloo")]
        if given.get("outer_optimizer") == "adasum":  # Horovod has it over MPI alone
            other = []
        # MPI is at its best before it is compared
        found += [*other, *of_mpi] if controller == "gloo" else [*of_mpi, *other]
    if workers > 1 and build and build.nccl and given.get("device") != "cpu":
        found.append(("NCCL_ALGO", "Tree"))
    if workers > 1:
        found += [("HOROVOD_CYCLE_TIME", value) for value in (0.2, 5)]
    cores = len(os.sched_getaffinity(0))
    found += [("threads", count) for count in sorted({1, max(1, cores // max(on_hosts)), cores})]
    compression = str(given.get("compression") or "none")
    if workers > 1 and not given.get("sync_every") and not compression.startswith(LOW_RANK):
        found += [("compression", "fp16"), ("compression", "bf16"), *_CHANGES_CURVE]
    found += [("precision", "bf16"), ("compile", True)]
    now = {**os.environ, "threads": threads_per_worker(max(on_hosts)), **_set_values(given)}
    return [(name, value) for name, value in found if str(now.get(name)) != str(value)]


def _set_values(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def tune(
    layers: list[Layer],
    tries: Sequence[tuple[str, Any]],
    measure: Callable[[Setting], dict[str, Any]],
    *,
    workers: int,
    start: Setting,
    repeat: int = REPEAT,
    hosts: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Try settings one after the other, each beside the best one before it, and keep those that gain.

    A signal ends it; what was found by then is returned.

    Args:
        layers: the job's config values, weakest source first.
        tries: names and values to try.
        measure: runs the job with a setting, and returns the document of what it found.
        workers: number of workers.
        start: how the job is run now.
        repeat: how many pairs of runs there are for each setting.
        hosts: the user's hosts and slots; None for this host.
        say: is called with what is going on.

    Raises:
        EnvironmentFault: If the job fails as it is.
        Interrupted: If a signal comes before anything is found.
    """
    best, trials = start, list[Trial]()
    runs: list[dict[str, Any]] = []

    def run(setting: Setting) -> dict[str, Any]:
        runs.append(measure(setting))
        return runs[-1]

    gain, interruption, problem = None, None, ""
    most = 1 + 2 * repeat * (len(tries) + 1)
    say(
        f"{counted(len(tries), 'setting')} to try, each in {counted(repeat, 'pair')} of runs; "
        "first the job as it is ..."
    )
    begun = time.monotonic()
    first_loss = float(run(best)["first_loss"])  # also fails early if the job does not run
    seconds = time.monotonic() - begun
    say(f"it took {seconds:.0f} s: up to {most} runs take about {_in_words(seconds * most)}")
    try:
        for name, value in tries:
            if variables_of(name, value) and best.controller == "gloo":
                continue
            say(f"{name} {value} ...")
            trial = _try(name, value, _Beside(run, best, first_loss, repeat))
            trials.append(trial)
            say(f"  {trial.describe()}")
            if trial.kept:
                best = best.changed(name, value)
        if best != start:
            say("all that was kept ...")
            gain, problem = _together(best, _Beside(run, start, first_loss, repeat))
    except Interrupted as error:
        if not trials:
            raise
        interruption = error
    warnings = [one["warnings"][0] for one in runs if one.get("warnings")]
    return Tuning(layers, workers, trials, best, gain, warnings, len(runs), hosts, interruption, problem)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else counted(round(seconds / 60), "minute")


@dataclass(frozen=True)
class _Beside:
    """Measures settings beside another one.

    Attributes:
        measure: runs the job with a setting.
        other: the other setting.
        first_loss: the loss that the job begins with.
        repeat: how many pairs of runs there are.
    """

    measure: Callable[[Setting], dict[str, Any]]
    other: Setting
    first_loss: float
    repeat: int

    def ratio_of(self, setting: Setting) -> Spread:
        """Return the step with a setting relative to the other's, of each pair of runs.

        Raises:
            EnvironmentFault: If the job fails with it, or begins with another loss.
        """
        ratios = []
        for turn in range(self.repeat):
            # in every other pair the other one comes first, for what the machine does changes slowly
            before = self._seconds_of(self.other) if turn % 2 else 0.0
            own = self._seconds_of(setting)
            ratios.append(own / (before or self._seconds_of(self.other)))
        return Spread.of(ratios)

    def _seconds_of(self, setting: Setting) -> float:
        found = self.measure(setting)
        loss = found["first_loss"]
        if not math.isclose(loss, self.first_loss, rel_tol=_NEAR_LOSS):
            raise EnvironmentFault(f"the first loss is {loss:.4g} in place of {self.first_loss:.4g}")
        return float(found["chunk_seconds"]["median"])


def _try(name: str, value: Any, beside: _Beside) -> Trial:
    try:
        ratio = beside.ratio_of(beside.other.changed(name, value))
    except EnvironmentFault as error:
        return Trial(name, value, None, False, f"not measured: {_reason(error)}")
    is_faster = ratio.high < 1 and ratio.median <= 1 - _LEAST_GAIN and beside.repeat > 1
    changes = (name, value) in _CHANGES_CURVE
    return Trial(name, value, ratio, is_faster and not changes, offered=is_faster and changes)


def _together(best: Setting, beside: _Beside) -> tuple[Spread | None, str]:
    """Return the step with all that was kept relative to the job as it was, or why it was not measured."""
    try:
        return beside.ratio_of(best), ""
    except EnvironmentFault as error:
        return None, f"all that was kept was not measured together: {_reason(error)}"


def _reason(error: EnvironmentFault) -> str:
    last = next((line for line in reversed(error.remedy.splitlines()) if line.strip()), "")
    return f"{error.problem}. {last.strip()}".strip()
