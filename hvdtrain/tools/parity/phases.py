"""The jobs of `prove`: with all workers, and in a process of its own everything that one worker does."""

import itertools
import json
import math
import random
import shutil
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import PortableState
from hvdtrain.config import Layer
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.host.launcher import muted_console
from hvdtrain.host.processes import end_with_parent
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import open_together
from hvdtrain.jobs.opening.start import prepare, settle, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.signals import interruptible
from hvdtrain.jobs.train import run_job
from hvdtrain.session import Session
from hvdtrain.tools.launch import layers_from_json, run_worker
from hvdtrain.tools.parity.plain import PlainLoop, halves_of, mean_of, rows_of, steps_of
from hvdtrain.tools.parity.proof import (
    Comparison,
    Rounding,
    Run,
    Traits,
    cause_of,
    compare,
    compare_evaluations,
    equal_arrays,
    rounding_of,
    run_in,
    splits,
)
from hvdtrain.tools.parity.sides import of_framework, open_loop
from hvdtrain.training_plan import Progress
from hvdtrain.workers.seeding import seed_host_generators, seeded_frameworks

MANY, ONE, RESUMED, FOUND = "many", "one", "resumed", "found.json"
_WHOLE = 1024  # samples that are evaluated in one batch at most
_LAST_BITS = 2e-7  # relative
_REPEATED = 1e-4  # relative; of the first losses of two plain loops


class Quiet:
    """Takes the place of a task's class; its tasks' models have dropout layers that drop nothing.

    Args:
        task_class: the task's class.
    """

    def __init__(self, task_class: Any) -> None:
        self._class, self.rates = task_class, list[float]()
        self.defaults = getattr(task_class, "defaults", {})
        self.__wrapped__ = task_class  # inspect.signature follows it

    def __call__(self, **options: Any) -> Any:
        """Return a task."""
        task = self._class(**options)
        for framework in ("torch", "tf"):
            if (make := getattr(task, f"{framework}_model", None)) is not None:
                setattr(task, f"{framework}_model", lambda make=make, of=framework: self._stopped(make(), of))
        return task

    def _stopped(self, model: Any, framework: str) -> Any:
        self.rates = of_framework(framework).stop_dropout(model)
        return model


def train(layers: list[Layer], run_dir: Path, **values: Any) -> None:
    """Collective. Train without a word."""
    given = [*layers, Layer("prove", {"run_dir": str(run_dir), **values})]
    with muted_console(True):
        run_job(given, Quiet(settle(given)[0]), from_python=True)


def prove_alone(values: Mapping[str, Any]) -> None:
    """Do what one worker does, compare all runs, and write what was found."""
    folder, layers = Path(values["folder"]), layers_from_json(values["layers"])
    if values["phase"] == MANY:
        train(layers, folder / MANY)
        return
    end_with_parent(values["parent"], signal.SIGKILL)
    found = _Proof(folder, layers, values["workers"], values["steps"]).document()
    (folder / FOUND).write_text(json.dumps(found), encoding="utf-8")


class _Proof:
    """What one worker does, and compares."""

    def __init__(self, folder: Path, layers: list[Layer], workers: int, steps: int) -> None:
        self.folder, self.layers, self.workers, self.steps = folder, layers, workers, steps
        self.half = steps // 2
        self.stopped = f"stopped at step {self.half} of {workers} workers, resumed by 1"
        own: int = layers[-1].values["eval_batch_size"]  # of each worker
        self.together = own * workers
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.traits = Traits()
        self.has_differed = False

    def document(self) -> dict[str, Any]:
        """Return what was found."""
        many = run_in(self.folder / MANY)
        train(self.layers, self.folder / ONE, eval_batch_size=self.together)
        one = run_in(self.folder / ONE)
        rounding, plain = self._plain(one)
        if plain is not None:
            is_biased = self.framework == "torch" and self.has_norms
            found = compare(plain, one, rounding, left_out="/moving_variance" if is_biased else "/left out")
            self._add("a plain loop and hvdtrain, 1 worker", found, is_plain=True)
            if not is_biased:
                self._evaluated(plain.evaluation, one.evaluation, rounding.evaluation)
        draws = [name for name in self.traits.generators if name == self.framework]
        if draws or self.per_worker_loss:
            why = f"draws random numbers of {draws[0]}" if draws else "has per_worker_loss"
            for what in (f"1 worker and {self.workers}", self.stopped):
                self._row(what, None, f"not compared: the task {why}")
        else:
            self._add(f"1 worker and {self.workers}", compare(one, many, rounding))
            self._evaluated(one.evaluation, many.evaluation, rounding.evaluation)
            self._resumed(many, rounding)
        self._whole(many)
        self._loaded(many)
        return {
            "rows": self.rows, "notes": self.notes, "traits": asdict(self.traits),
            "framework": self.framework, "task": self.task, "batch": self.batch,
            "proved": all(row["ok"] is not False for row in self.rows),
        }  # fmt: skip

    def _plain(self, one: Run) -> tuple[Rounding, Run | None]:
        """Train plain loops, look at the task, and return what rounding does, and the loop's run."""
        with interruptible() as signals, seeded_frameworks(), muted_console(True):
            quiet = Quiet(settle(self.layers)[0])
            together = Layer("prove", {"eval_batch_size": self.together})  # the batches of one worker
            job = prepare([*self.layers, together], quiet)
            self.framework, self.task = job.config.framework, job.config.task
            with started(job, signals, stays=True) as backend:
                task_data, info, _ = open_together(job, backend)
                config = with_learning_rate(job.config, info.own_rates)
                restore(config, backend, len(task_data.train_data))
                with readers_for(config, task_data.train_data, task_data.eval_data) as readers:
                    session = new_session(config, backend, task_data, ResumePoint(), readers)
                    return self._loops(session, task_data.task, info, one, quiet)

    def _loops(
        self, session: Session, task: Any, info: Any, one: Run, quiet: Quiet
    ) -> tuple[Rounding, Run | None]:
        config, self.task_object = session.config, task
        sizes = [len(data) for data in sets_of(session.data.evaluation).values() if hasattr(data, "__len__")]
        self.whole = min([_WHOLE, *sizes[:1]])
        self.batch = config.global_batch_size
        self.per_worker_loss = bool(getattr(task, "per_worker_loss", False))
        self.has_norms = info.batch_norm_layers > 0
        if self.has_norms:
            self.notes.append(
                "batch norm is synchronised here, as by --sync-batch-norm; without it, curves depend on the "
                "number of workers"
            )
        if self.has_norms and config.framework == "torch":
            self.notes.append(
                "moving variances are not compared with the plain loop: PyTorch's layer takes n / (n - 1) "
                "times the batch's variance, synchronised batch norm the variance itself"
            )
        if quiet.rates:
            rates = ", ".join(f"{rate:g}" for rate in sorted(set(quiet.rates)))
            self.notes.append(f"dropout layers (rates {rates}) drop nothing in what is compared")
        try:
            loop = open_loop(session, task, info)
        except TaskError as error:
            self.notes.append(f"no plain loop: {error.problem}; hvdtrain with one worker is the judge")
            return Rounding(one.arrays(self.steps), list(info.parameter_shapes)), None
        batches = steps_of(session, self.steps)
        self._look(session, loop, task, batches[0])
        start = loop.start
        runs = []
        shaken = _shaken(start, loop.trained)
        for begin in (start, shaken):
            loop.restart(begin)
            self._seed(loop)
            loop.noise = 0.0 if begin is start else _LAST_BITS
            runs.append(self._trained(session, loop, batches))
        changed = [
            name
            for name in start
            if name not in loop.trained and equal_arrays({name: start[name]}, runs[0].arrays(self.steps))
        ]
        self.traits = replace(self.traits, changed=changed)
        rounding = rounding_of(runs[0], runs[1], (start, shaken), loop.trained)
        if rounding.losses[1] > _REPEATED * max(abs(runs[0].losses[1]), 1e-3):
            # rounding as large would hide differences
            self._row("a plain loop, twice", False, "it is not reproducible: its first loss differs")
            rounding = replace(rounding, losses={}, arrays={}, evaluation=0.0)
        if self.framework == "tf" and "tf" in self.traits.generators:
            text = "not compared: the task draws random numbers"
            self._row("a plain loop and hvdtrain, 1 worker", None, text)
            return rounding, None
        return rounding, runs[0]

    def _trained(self, session: Session, loop: PlainLoop, batches: Any) -> Run:
        losses, states = {}, {}
        for number, (samples, rate) in enumerate(batches):
            losses[number + 1] = loop.step(samples, number, rate)
            states[number + 1] = loop.arrays()
        evaluation = {}
        if session.data.evaluation is not None:
            total = weight = 0.0
            first = next(iter(sets_of(session.data.evaluation)))
            try:
                with session.data.eval_feed(session.plan(), first) as feed:
                    for batch in feed:
                        samples = rows_of(batch)
                        mean, count = mean_of(loop.losses(samples, False))
                        count = len(next(iter(samples.values()))) if math.isnan(count) else count
                        total, weight = total + mean * count, weight + count
                evaluation = {"loss": total / weight}
            except HvdtrainError:
                pass  # a task without a loss
        return Run(losses, lambda step: states[step], evaluation)

    def _look(self, session: Session, loop: PlainLoop, task: Any, first: Any) -> None:
        """Find out what of the task the number of workers can change."""
        samples, config = first[0], session.config
        own_step = hasattr(task, f"{config.framework}_step")
        traits = Traits(has_own_step=own_step, has_callbacks=hasattr(task, "callbacks"))
        seed_host_generators(1, "another reading")
        again = session.data.batch_again(session.plan(), Progress())
        if again is not None:
            read = rows_of(again)
            names = [name for name in samples if equal_arrays({name: samples[name]}, read)]
            traits = replace(traits, drawn=names[0] if names else "")
        try:
            drawn = {True: list[str](), False: list[str]()}
            if not self._is_hidden(loop, samples):
                drawn = {training: self._generators(loop, samples, training) for training in drawn}
            if hidden := self._is_hidden(loop, samples):
                drawn = {training: [] for training in drawn}
            traits = replace(traits, is_hidden=hidden, generators=drawn[True], in_evaluation=drawn[False])
            for training in (False, True):
                if drawn[training]:
                    continue  # the halves draw other numbers
                depends = splits(
                    self._losses(loop, samples, training),
                    [self._losses(loop, part, training) for part in halves_of(samples)],
                    mean_of,
                )
                is_of_norm = training and any(name.endswith("/moving_mean") for name in loop.start)
                if depends and not (is_of_norm or traits.depends or traits.is_hidden):
                    traits = replace(traits, depends=depends, in_training=training)
        except HvdtrainError:
            pass  # a step of its own has no loss that can be looked at
        self.traits = traits

    def _is_hidden(self, loop: PlainLoop, samples: Any) -> bool:
        twice = [mean_of(self._losses(loop, samples, True))[0] for _ in range(2)]
        self.first_loss = getattr(self, "first_loss", twice[0])
        return not all(math.isclose(self.first_loss, one, rel_tol=1e-6, abs_tol=1e-9) for one in twice)

    def _losses(self, loop: PlainLoop, samples: Any, training: bool, *seed: Any) -> Any:
        """Return losses with equal draws, and from the initial state, which such a call may change."""
        for one in loop.state.fields:
            if one.name not in loop.trained:
                one.write(loop.start)
        self._seed(loop, *seed)
        return loop.losses(samples, training)

    def _seed(self, loop: PlainLoop, other: str = "", seed: int = 3) -> None:
        seeds = {name: seed if name == other else 3 for name in ("random", "numpy", loop.framework)}
        random.seed(seeds["random"])
        np.random.seed(seeds["numpy"])
        loop.seed(loop.framework, seeds[loop.framework])

    def _generators(self, loop: PlainLoop, samples: Any, training: bool) -> list[str]:
        """Return the generators whose numbers change the loss."""
        base = mean_of(self._losses(loop, samples, training))[0]
        least = 1e-6 * max(abs(base), 1e-6)
        tried = itertools.product(("random", "numpy", loop.framework), range(7, 12))
        found = ((one, mean_of(self._losses(loop, samples, training, one, seed))[0]) for one, seed in tried)
        return list(dict.fromkeys(one for one, value in found if abs(value - base) > least))

    def _row(
        self, what: str, ok: bool | None, text: str, found: Comparison | None = None, cause: str = ""
    ) -> None:
        row = {"what": what, "ok": ok, "text": text, "cause": cause}
        self.rows.append({**({} if found is None else asdict(found)), **row})

    def _add(self, what: str, found: Comparison, *, is_plain: bool = False) -> None:
        if not found.step:
            self._row(what, True, "", found)
            return
        name = found.name.removeprefix("model/") or "the loss"
        text = f"step {found.step}, {name}: {found.text}"
        cause = cause_of(found, self.traits, is_plain=is_plain, framework=self.framework)
        self._row(what, False, text, found, cause)
        self.has_differed |= not is_plain

    def _evaluated(self, ref: Mapping[str, float], other: Mapping[str, float], noise: float = 0.0) -> None:
        if ref and other and self.rows[-1]["ok"] is not False:  # else evaluations differ, too
            self._metrics("  their evaluations", ref, other, noise)

    def _metrics(
        self,
        what: str,
        ref: Mapping[str, float],
        other: Mapping[str, float],
        noise: float = 0.0,
        why: str = "",
    ) -> None:
        """Add a row on two evaluations; ``why`` says why they may differ, if they may."""
        differ = compare_evaluations(ref, other, noise)
        if not differ:
            self._row(what, True, ", ".join(name for name in ref if name in other))
            return
        if self.framework in self.traits.in_evaluation:
            why = f"the evaluation draws random numbers of {self.framework}"
        text = "; ".join(f"{name} is {b:.7g} in place of {a:.7g}" for name, (a, b) in differ.items())
        if why:
            self._row(what, None, f"not compared: {why} ({text})")
        else:
            self._row(what, False, text, cause=self._cause_of_metrics(differ))

    def _cause_of_metrics(self, differ: Mapping[str, Any]) -> str:
        if "loss" in differ:
            return cause_of(Comparison(), self.traits, is_plain=False, framework=self.framework)
        return (
            f"{', '.join(differ)}: averaged over batches, or of other samples of a batch: give a value for "
            "each sample, hvdtrain.SumMetric or hvdtrain.GatheredMetric"
        )

    def _resumed(self, many: Run, rounding: Rounding) -> None:
        if self.has_differed:
            self._row(self.stopped, None, "not compared: it follows from the difference above")
            return
        target = self.folder / RESUMED
        shutil.copytree(self.folder / MANY, target)
        for path in sorted((target / "checkpoints").iterdir())[self.half :]:
            shutil.rmtree(path)
        train(self.layers, target, resume="auto", eval_batch_size=self.together)
        found = run_in(target)
        self._add(self.stopped, compare(many, found, rounding, self.half + 1))
        self._evaluated(many.evaluation, found.evaluation, rounding.evaluation)

    def _whole(self, many: Run) -> None:
        if not many.evaluation:
            return
        with muted_console(True):
            output = self.folder / "evaluation.jsonl"
            whole = hvdtrain.evaluate(
                self.folder / MANY, self.task, output=output, eval_batch_size=self.whole
            )
        # which all_gather makes equal in parts of one size
        may = self.traits.depends and not self.traits.in_training and not self.has_differed
        why = "the loss or a metric compares the samples of a batch" if may else ""
        self._metrics(
            f"evaluated in batches of {self.whole:,}, and in parts", whole, many.evaluation, why=why
        )

    def _loaded(self, many: Run) -> None:
        with muted_console(True):
            model = hvdtrain.load(self.folder / MANY, self.task)
        state = of_framework(self.framework).ModelState(model, Renaming(self.task_object, self.framework))
        loaded = {one.name: one.read() for one in state.fields}
        name = equal_arrays(loaded, many.arrays(self.steps))  # a loss is no part of it
        text = f"{name.removeprefix('model/')} is not what was saved" if name else "bit by bit"
        self._row("the trained model, loaded by hvdtrain.load", not name, text)


def _shaken(start: PortableState, trained: Collection[str]) -> PortableState:
    """Return arrays of which the trained ones differ in the last bits, as rounding makes them."""
    draw = np.random.default_rng(0)
    return {
        name: (array * (1 + _LAST_BITS * draw.standard_normal(array.shape))).astype(array.dtype)
        if name in trained and array.dtype.kind == "f"
        else array
        for name, array in start.items()
    }


if __name__ == "__main__":
    run_worker(prove_alone)
