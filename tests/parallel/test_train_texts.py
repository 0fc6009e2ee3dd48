"""Text trains: the same curve at any number of workers and in both frameworks, and something is learned."""

import json
import random

import numpy as np
import pytest
from support.documents import ROOT
from support.pool import controller_of, shared_run, train

SHAKESPEARE = str(ROOT / "examples" / "shakespeare.yaml")
TOLERANCE = 1e-4  # relative, per step: the design's promise
STEPS = 30


def run_of_the_example(framework, workers, controller):
    """Train the example's model, with its global batch of 12, on the text that Python brings along."""
    options = ("--steps", str(STEPS), "--log-every", "1", "--set", "task_options.eval_fraction=0.002")
    return shared_run(workers, controller, SHAKESPEARE, "--framework", framework, *options)


@pytest.mark.parametrize(("framework", "workers", "controller"), [("tf", 2, "gloo")])
def test_the_curve_of_a_language_model_is_the_same_everywhere(framework, workers, controller):
    run = run_of_the_example(framework, workers, controller)
    expected = run_of_the_example("torch", 1, "none")
    assert {line["workers"] for line in run.metrics} == {workers}
    assert len(run.losses) == len(expected.losses) == STEPS
    assert run.difference(expected) < TOLERANCE
    assert run.summary["final"]["loss"] == pytest.approx(expected.summary["final"]["loss"], rel=TOLERANCE)


def mails(count):
    """Make texts whose label can be told by one word among others."""
    rng = random.Random(5)
    words = [f"word{i}" for i in range(30)]
    signs = {"ham": ["lunch", "monday"], "spam": ["cash", "offer"], "list": ["unsubscribe", "digest"]}
    for i in range(count):
        label = list(signs)[i % 3]
        text = [*rng.sample(words, 6), rng.choice(signs[label])]
        rng.shuffle(text)
        yield " ".join(text), label


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_texts_are_classified(framework, tmp_path):
    path = tmp_path / "mails.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "kind": label}) for text, label in mails(600)))
    options = {"path": path, "text": "body", "label": "kind", "context": 10}
    sizes = {"channels": 32, "layers": 1, "heads": 2}
    settings = [f"--set=task_options.{name}={value}" for name, value in {**options, **sizes}.items()]
    run = train(
        2,
        controller_of(framework, 2),
        *("--framework", framework, "--task", "classify-text", "--epochs", "8", *settings),
        *("--batch-size", "16", "--learning-rate", "0.01"),
        cwd=tmp_path,
    )
    assert run.summary["workers"] == 2
    assert run.summary["samples"] == 8 * 540
    assert run.summary["final"]["accuracy"] >= 0.98


@pytest.mark.parametrize(("framework", "model"), [("torch", "convnet"), ("tf", "gpt")])
def test_synthetic_data_train(framework, model, tmp_path):
    options = {"model": model, "context": 16, "layers": 1, "channels": 32, "eval_samples": 10}
    settings = [f"--set=task_options.{name}={value}" for name, value in options.items()]
    run = train(
        2,
        controller_of(framework, 2),
        *("--framework", framework, "--task", "synthetic", "--steps", "6", "--log-every", "1", *settings),
        cwd=tmp_path,
    )
    assert len(run.losses) == 6
    assert np.isfinite(run.losses).all()
    assert run.summary["final"]["loss"] > 1.5  # there is nothing to learn
