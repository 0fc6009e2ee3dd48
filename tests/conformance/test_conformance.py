"""The plain loop is the judge: models of the zoo train as it does with any number of workers, or are refused.

A case is a model in one framework. It proves that the losses of four steps and of two evaluations are those
that a loop of the framework computes on whole batches; so initial values, gradients, the optimizer, what the
model keeps, and padding are right. Two steps are those of one worker, unless the model says otherwise; then
the job is resumed from their checkpoint by two, whose parts of 25 samples are unequal. Of models that keep
state (``EVALUATED``) ``evaluate`` with one worker must find the same from the last checkpoint.

Models that keep nothing but parameters (``AT_ONCE``) are trained for two steps by two workers, not resumed:
that the parameters of a checkpoint are read back is what other themes prove.

Or it proves that the job ends before the first step, with the words that name what is wrong and the remedy.
"""

import functools
import json
from pathlib import Path

import pytest
from conformance.zoo import load_models
from support import pool
from support.jobs import temporary_folder

MODELS = Path(__file__).with_name("models")
CONTROLLER = {"torch": "mpi", "tf": "gloo"}
# themes whose models keep nothing from step to step but parameters
AT_ONCE = {
    "batch_losses", "derivatives", "embeddings", "flow", "keras_layers", "keras_masks", "looks",
    "outputs", "recurrent", "static_shapes", "tables", "wide_numbers",
}  # fmt: skip
EVALUATED = {"keras_layer_state", "norms", "state"}  # whose models evaluate with what they keep
ZOO = {
    f"{path.stem}.{name}": (path, kind)
    for path in sorted(MODELS.glob("*.py"))
    for name, kind in load_models(path).items()
}
JOBS = [
    (name, framework, kind.judge.workers[0 if kind.judge.refused else -1])
    for name, (_, kind) in ZOO.items()
    for framework in kind.frameworks()
]


@functools.cache
def expected(name, framework):
    """Return what the plain loop computes, in a process of its framework."""
    path, _ = ZOO[name]
    done = pool.call(
        pool.Key(framework, "none", 1),
        "conformance.zoo:judged",
        temporary_folder(),
        path=str(path),
        name=name.rpartition(".")[2],
        framework=framework,
    )
    return done.values[0]


def run(name, framework, workers, *words, folder):
    path, kind = ZOO[name]
    options = ("--framework", framework, "--task", f"{path}:{name.rpartition('.')[2]}")
    options += () if words[0] == "evaluate" else kind.judge.options
    controller = "none" if workers == 1 else CONTROLLER[framework]
    return pool.command(workers, controller, framework, *words, *options, cwd=folder)


def losses_of(folder):
    found = {"train": [], "eval": []}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found[line["phase"]].append(line["loss"])
    return found


def words_of(text):
    return " ".join(text.split())


@pytest.mark.parametrize(("model", "framework", "workers"), JOBS)
def test_a_model_trains_as_in_a_plain_loop_or_is_refused(model, framework, workers, tmp_path):
    kind, folder, output = ZOO[model][1], tmp_path / "run", tmp_path / "evaluation.jsonl"
    judge, job = kind.judge, functools.partial(run, model, framework, folder=tmp_path)
    is_at_once = model.partition(".")[0] in AT_ONCE and not judge.draws
    steps = "2" if is_at_once else str(kind.defaults["steps"])
    first = workers if judge.draws or (is_at_once and not judge.refused) else judge.workers[0]
    last = job(first, "train", "--run-dir", str(folder), "--steps", "2")
    if judge.refused:
        assert last.returncode == 2, last.output
        assert all(text in words_of(last.stderr) for text in judge.refused), last.output
        assert "Traceback" not in last.output
        return
    assert last.returncode == 0, last.output
    assert all(text in words_of(last.output) for text in judge.noted), last.output
    if not is_at_once:
        last = job(workers, "train", "--run-dir", str(folder), "--resume", "--steps", steps)
        assert last.returncode == 0, last.output
    found = losses_of(folder)
    if judge.draws:
        whole = job(workers, "train", "--run-dir", str(tmp_path / "whole"), "--steps", steps)
        assert whole.returncode == 0, whole.output
        wanted = losses_of(tmp_path / "whole")
        assert len(set(wanted["train"])) == len(wanted["train"])
    else:
        of_loop = expected(model, framework)
        wanted = {"train": of_loop["train"][: int(steps)], "eval": of_loop["eval"][: int(steps) // 2]}
    assert found["train"] == pytest.approx(wanted["train"], rel=judge.rtol, abs=1e-6), last.output
    assert found["eval"] == pytest.approx(wanted["eval"], rel=judge.rtol, abs=1e-6), last.output
    if wanted["eval"] and model.partition(".")[0] in EVALUATED and framework == kind.frameworks()[0]:
        done = job(first, "evaluate", str(folder), "--output", str(output))
        assert done.returncode == 0, done.output
        loss = json.loads(output.read_text())["loss"]
        assert loss == pytest.approx(wanted["eval"][-1], rel=judge.rtol, abs=1e-6)
