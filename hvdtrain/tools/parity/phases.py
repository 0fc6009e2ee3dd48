"""The jobs of `prove`: with all workers, and in a process of its own everything that one worker does."""

import itertools
import math
import random
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.config import Layer
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import TaskError
from hvdtrain.host.launcher import muted_console
from hvdtrain.host.processes import end_with_parent
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.setup import opened
from hvdtrain.jobs.opening.start import prepare, settle, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.train import run_job
from hvdtrain.session import Session
from hvdtrain.tools.launch import layers_from_json, run_worker
from hvdtrain.tools.parity import proof
from hvdtrain.tools.parity.plain import PlainLoop, mean_of, of_framework, rows_of, steps_of
from hvdtrain.training_plan import Progress
from hvdtrain.workers.seeding import seed_host_generators, seeded_frameworks

MANY, ONE, RESUMED = "many", "one", "resumed"
_WHOLE = 1024  # samples that are evaluated in one batch at most
_LAST_BITS = 2e-7  # relative
_REPEATED = 1e-4  # relative; of the first losses of two plain loops


class Quiet:
    """Takes the place of a task's class; its tasks' models have dropout layers that drop nothing."""

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


def prove_alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Do what one worker does, compare all runs, and return what was found; or train with all workers."""
    folder, layers = Path(values["folder"]), layers_from_json(values["layers"])
    if values["phase"] == MANY:
        train(layers, folder / MANY)
        return {}
    end_with_parent(values["parent"], signal.SIGKILL)
    return _Proof(folder, layers, values["workers"], values["steps"]).document()


class _Proof:
    """What one worker does, and compares."""

    def __init__(self, folder: Path, layers: list[Layer], workers: int, steps: int) -> None:
        self.folder, self.layers, self.workers, self.steps = (folder, layers, workers, steps)
        self.together = layers[-1].values["eval_batch_size"] * workers
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.traits, self.rounding = proof.Traits(), proof.Rounding({}, [])
        self.has_differed = False  # whether workers, or a resume, do

    def document(self) -> dict[str, Any]:
        """Return what was found."""
        many = proof.run_in(self.folder / MANY)
        train(self.layers, self.folder / ONE, eval_batch_size=self.together)
        one = proof.run_in(self.folder / ONE)
        plain = self._plain(one)
        if plain is not None:
            is_biased = self.framework == "torch" and self.has_norms
            left_out = {"left_out": "/moving_variance"} if is_biased else {}
            self._add("a plain loop and hvdtrain, 1 worker", plain, one, is_plain=True, **left_out)
            if not is_biased:
                self._evaluated(plain, one)
        several, half = f"1 worker and {self.workers}", self.steps // 2
        stopped = f"stopped at step {half} of {self.workers} workers, resumed by 1"
        why = f"draws random numbers of {self.framework}" * (self.framework in self.traits.generators)
        why = why or "has per_worker_loss" * self.per_worker_loss
        if why:
            for what in (several, stopped):
                self._row(what, None, f"not compared: the task {why}")
        else:
            self._add(several, one, many)
            self._evaluated(one, many)
        if self.has_differed:
            self._row(stopped, None, "not compared: it follows from the difference above")
        elif not why:
            self._resumed(stopped, many, half)
        self._whole(many)
        self._loaded(many)
        return {
            "rows": self.rows, "notes": self.notes, "traits": asdict(self.traits),
            "framework": self.framework, "task": self.task, "batch": self.batch,
            "proved": all(row["ok"] is not False for row in self.rows),
        }  # fmt: skip

    def _plain(self, one: proof.Run) -> proof.Run | None:
        """Train plain loops, look at the task, and return the loop's run."""
        with interruptible() as signals, seeded_frameworks(), muted_console(True):
            quiet = Quiet(settle(self.layers)[0])
            together = Layer("prove", {"eval_batch_size": self.together})  # the batches of one worker
            job = prepare([*self.layers, together], quiet)
            self.framework, self.task = job.config.framework, job.config.task
            with started(job, signals, stays=True) as backend:
                run = opened(job, backend)
                config, task_data, info = run.config, run.task_data, run.model
                restore(run)
                with readers_for(config, task_data.train_data, task_data.eval_data) as readers:
                    session = new_session(run, ResumePoint(), readers)
                    self._note(session, task_data.task, info, quiet)
                    try:
                        loop = of_framework(self.framework).Loop(task_data.task, config, backend, info)
                    except TaskError as error:
                        self.traits = proof.Traits(
                            has_own_step=hasattr(task_data.task, f"{self.framework}_step")
                        )
                        why = f"no plain loop: {error.problem}; hvdtrain with one worker is the judge"
                        self.notes.append(why)
                        state: Any = backend.gather_state()
                        start = {name: np.array(array) for name, array in state.read().items()}
                        self.rounding = proof.Rounding(start, list(info.parameter_shapes))
                        return None
                    return self._loops(session, loop)

    def _note(self, session: Session, task: Any, info: Any, quiet: Quiet) -> None:
        self.task_object = task
        sizes = [len(data) for data in sets_of(session.data.evaluation).values() if hasattr(data, "__len__")]
        self.whole = min([_WHOLE, *sizes[:1]])
        self.batch = session.config.global_batch_size
        self.per_worker_loss = bool(getattr(task, "per_worker_loss", False))
        self.has_norms = info.batch_norm_layers > 0
        if self.has_norms:
            self.notes.append(
                "batch norm is synchronised here, as by --sync-batch-norm; without it, curves depend on the "
                "number of workers"
            )
        if self.has_norms and self.framework == "torch":
            self.notes.append(
                "moving variances are not compared with the plain loop: PyTorch's layer takes n / (n - 1) "
                "times the batch's variance, synchronised batch norm the variance itself"
            )
        if quiet.rates:
            rates = ", ".join(f"{rate:g}" for rate in sorted(set(quiet.rates)))
            self.notes.append(f"dropout layers (rates {rates}) drop nothing in what is compared")

    def _loops(self, session: Session, loop: PlainLoop) -> proof.Run | None:
        """Train two loops, the second from initial values of other last bits, and note what rounding does."""
        batches = steps_of(session, self.steps)
        self._look(session, loop, batches[0][0])
        start, draw = loop.start, np.random.default_rng(0)
        shaken = dict(start)
        for name in [name for name in start if name in loop.trained and start[name].dtype.kind == "f"]:
            bits = 1 + _LAST_BITS * draw.standard_normal(start[name].shape)
            shaken[name] = (start[name] * bits).astype(start[name].dtype)
        runs = []
        for begin, noise in ((start, 0.0), (shaken, _LAST_BITS)):
            loop.restart(begin)
            self._seed(loop)
            loop.noise = noise
            runs.append(self._trained(session, loop, batches))
        last = runs[0].arrays(self.steps)
        others = [name for name in start if name not in loop.trained]
        changed = [name for name in others if proof.equal_arrays({name: start[name]}, last)]
        self.traits = replace(self.traits, changed=changed)
        self.rounding = proof.rounding_of(runs[0], runs[1], (start, shaken), loop.trained)
        if self.rounding.losses[1] > _REPEATED * max(abs(runs[0].losses[1]), 1e-3):
            # rounding as large would hide differences
            self._row("a plain loop, twice", False, "it is not reproducible: its first loss differs")
            self.rounding = replace(self.rounding, losses={}, arrays={}, evaluation=0.0)
        if self.framework == "tf" and "tf" in self.traits.generators:
            text = "not compared: the task draws random numbers"
            self._row("a plain loop and hvdtrain, 1 worker", None, text)
            return None
        return runs[0]

    def _trained(self, session: Session, loop: PlainLoop, batches: Any) -> proof.Run:
        losses, states = {}, {}
        for number, (samples, rate) in enumerate(batches):
            losses[number + 1] = loop.step(samples, number, rate)
            states[number + 1] = loop.arrays()
        evaluation = {}
        if session.data.evaluation is not None:
            total = weight = 0.0
            first = next(iter(sets_of(session.data.evaluation)))
            with session.data.eval_feed(session.plan(), first) as feed:
                for batch in feed:
                    samples = rows_of(batch)
                    mean, count = mean_of(loop.losses(samples, False))
                    count = len(next(iter(samples.values()))) if math.isnan(count) else count
                    total, weight = total + mean * count, weight + count
            evaluation = {"loss": total / weight}
        return proof.Run(losses, lambda step: states[step], evaluation)

    def _look(self, session: Session, loop: PlainLoop, samples: Any) -> None:
        """Find out what of the task the number of workers can change."""
        seed_host_generators(1, "another reading")
        again = session.data.batch_again(session.plan(), Progress())
        read = samples if again is None else rows_of(again)
        drawn = next((name for name in samples if proof.equal_arrays({name: samples[name]}, read)), "")
        found: dict[bool, list[str]] = {True: [], False: []}
        if not self._is_hidden(loop, samples):
            found = {training: self._generators(loop, samples, training) for training in found}
        if hidden := self._is_hidden(loop, samples):
            found = {True: [], False: []}
        self.traits = proof.Traits(
            found[True],
            found[False],
            drawn=drawn,
            is_hidden=hidden,
            has_callbacks=hasattr(loop.task, "callbacks"),
        )
        middle = len(next(iter(samples.values()))) // 2
        parts = slice(None, middle), slice(middle, None)
        halves = [{name: array[part] for name, array in samples.items()} for part in parts]
        for training in [one for one in (False, True) if not found[one]]:  # else halves draw others
            depends = proof.splits(*(self._losses(loop, part, training) for part in (samples, *halves)))
            is_of_norm = training and any(name.endswith("/moving_mean") for name in loop.start)
            if depends and not (is_of_norm or self.traits.depends or hidden):
                self.traits = replace(self.traits, depends=depends, in_training=training)

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
        loop.seed(seeds[loop.framework])

    def _generators(self, loop: PlainLoop, samples: Any, training: bool) -> list[str]:
        """Return the generators whose numbers change the loss."""
        base = mean_of(self._losses(loop, samples, training))[0]
        least = 1e-6 * max(abs(base), 1e-6)
        tried = itertools.product(("random", "numpy", loop.framework), range(7, 12))
        found = ((one, mean_of(self._losses(loop, samples, training, one, seed))[0]) for one, seed in tried)
        return list(dict.fromkeys(one for one, value in found if abs(value - base) > least))

    def _row(self, what: str, ok: bool | None, text: str, cause: str = "", found: Any = None) -> None:
        numbers = asdict(found) if found else {}
        self.rows.append({**numbers, "what": what, "ok": ok, "text": text, "cause": cause})

    def _add(self, what: str, ref: proof.Run, other: proof.Run, is_plain: bool = False, **how: Any) -> None:
        found = proof.compare(ref, other, self.rounding, **how)
        text = f"step {found.step}, {found.name.removeprefix('model/') or 'the loss'}: {found.text}"
        if found.step:
            cause = proof.cause_of(found, self.traits, is_plain=is_plain, framework=self.framework)
            self._row(what, False, text, cause, found)
            self.has_differed |= not is_plain
        else:
            self._row(what, True, "", found=found)

    def _evaluated(self, ref: proof.Run, other: proof.Run) -> None:
        """Compare the evaluations of two runs that do not differ in training."""
        if ref.evaluation and other.evaluation and self.rows[-1]["ok"] is not False:
            noise = self.rounding.evaluation
            self._metrics("  their evaluations", ref.evaluation, other.evaluation, noise)

    def _metrics(self, what: str, ref: Any, other: Any, noise: float = 0.0, otherwise: str = "") -> None:
        """Add a row on two evaluations; ``otherwise`` is the cause if no kind explains it."""
        differ = proof.compare_evaluations(ref, other, noise)
        text = "; ".join(f"{name} is {b:.7g} in place of {a:.7g}" for name, (a, b) in differ.items())
        if not differ:
            same = (name if ref[name] else f"{name} (0 in both)" for name in ref if name in other)
            self._row(what, True, ", ".join(same))
        elif self.framework in self.traits.in_evaluation:
            why = f"the evaluation draws random numbers of {self.framework}"
            self._row(what, None, f"not compared: {why} ({text})")
        elif self.per_worker_loss and self.traits.depends:
            self._row(what, None, f"not compared: the task has per_worker_loss ({text})")
        elif "loss" in differ:
            cause = proof.cause_of(proof.Comparison(), self.traits, is_plain=False, framework=self.framework)
            self._row(what, False, text, cause or otherwise)
        else:
            self._row(what, False, text, (
                f"{', '.join(differ)}: averaged over batches, or of other samples of a batch: give a value "
                "for each sample, hvdtrain.SumMetric or hvdtrain.GatheredMetric"
            ))  # fmt: skip

    def _resumed(self, what: str, many: proof.Run, half: int) -> None:
        target = self.folder / RESUMED
        shutil.copytree(self.folder / MANY, target)
        for path in sorted((target / "checkpoints").iterdir())[half:]:
            shutil.rmtree(path)
        train(self.layers, target, resume="auto", eval_batch_size=self.together)
        found = proof.run_in(target)
        self._add(what, many, found, first=half + 1)
        self._evaluated(many, found)

    def _whole(self, many: proof.Run) -> None:
        if not many.evaluation:
            return
        # where samples are compared with others of their batch, only equal batches have equal losses
        depends = self.traits.depends and not self.traits.in_training
        size, output = (self.together if depends else self.whole, self.folder / "evaluation.jsonl")
        with muted_console(True):
            whole = hvdtrain.evaluate(self.folder / MANY, self.task, output=output, eval_batch_size=size)
        otherwise = "" if self.has_differed else (
            "a model that is loaded computes something else than the one that was saved, such as by a layer "
            "that keeps more than its variables"
        )  # fmt: skip
        what = f"evaluated in batches of {size:,}, and in parts"
        self._metrics(what, whole, many.evaluation, otherwise=otherwise)

    def _loaded(self, many: proof.Run) -> None:
        with muted_console(True):
            model = hvdtrain.load(self.folder / MANY, self.task)
        state = of_framework(self.framework).ModelState(model, Renaming(self.task_object, self.framework))
        loaded = {one.name: one.read() for one in state.fields}
        name = proof.equal_arrays(loaded, many.arrays(self.steps))  # a loss is no part of it
        text = f"{name.removeprefix('model/')} is not what was saved" if name else "bit by bit"
        self._row("the trained model, loaded by hvdtrain.load", not name, text)


if __name__ == "__main__":
    run_worker(prove_alone)
