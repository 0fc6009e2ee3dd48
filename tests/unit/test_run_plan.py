"""The plan: the text that is printed before training, compared with golden/plan.txt."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from support.fakes import FakeWorkers, given_run, make_session
from support.states import make_record

from hvdtrain.backends.records import ModelInfo, OwnRates
from hvdtrain.jobs.plan_text import describe_model, describe_plan
from hvdtrain.jobs.resume import ResumePoint

NEW = ResumePoint()


def plan(
    hosts=("alpha", "alpha", "beta", "beta"), *, own=None, start=NEW, found="", norms=0, leaves_out=False,
    reduction="fp32, sent uncompressed", **fields,
) -> dict[str, str]:  # fmt: skip
    """Give the plan's lines by their name; the title goes by ""."""
    workers = FakeWorkers(0, list(hosts), None, [])
    session = make_session("runs/x", workers, **{"train_size": 1797, "eval_size": 360, **fields})
    session.state.progress = start.progress
    run = given_run(session.config, session.backend)
    task = SimpleNamespace(describe=lambda: found) if found else None
    known = {"batch_norm_layers": norms, "reduction": reduction, "own_rates": own}
    model = replace(session.backend.model_info(), leaves_out_padding=leaves_out, **known)
    run = replace(run, task_data=replace(run.task_data, task=task), model=model, hosts=hosts)
    text = describe_plan(run, session, start)
    title, *lines = text.splitlines()
    return {"": title.partition(": ")[2]} | {line[2:16].strip(): line[17:] for line in lines}


RESUMED = ResumePoint(
    origin="runs/y/checkpoints/step-00000004: step 4, sample 512 (epoch 0.28)",
    manifest=make_record(4, samples=512),
    changes=("batch_size 64 -> 32", "workers 2 -> 4"),
)
FIXED = {"lr_scaling": "none"}
NORMS = {"norms": 20}
CASES = {
    "one worker": {"hosts": ["alpha"], "norms": 20},
    "three workers": {"hosts": ["alpha", "beta", "alpha"]},
    "many hosts": {"hosts": [f"h{i}" for i in range(20)]},
    "lars": {"optimizer": "lars", "momentum": 0.8, "weight_decay": 1e-4},
    "lamb": {"optimizer": "lamb", "weight_decay": 0.01},
    "plain sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "clipped": {"optimizer": "adamw", "clip_norm": 1.0},
    "regularised": {"label_smoothing": 0.1, "ema_decay": 0.999},
    "early stopping": {"early_stopping": "accuracy", "early_stopping_patience": 1},
    "accumulated": {"accumulate": 2},
    "global batch": {"global_batch_size": 48},
    "uneven batch": {"global_batch_size": 50, **NORMS},
    "uneven, left out": {"global_batch_size": 50, "leaves_out": True, **NORMS},
    "batch norm of micro-batches": {"global_batch_size": 50, "accumulate": 4, "hosts": ["alpha"], **NORMS},
    "synchronised": {"sync_batch_norm": True, **NORMS},
    "nothing to synchronise": {"sync_batch_norm": True},
    "evaluation at the end": {"epochs": 2, "eval_every": None},
    "steps": {"epochs": None, "steps": 100, "eval_every": 10},
    "no evaluation": {"eval_size": 0},
    "square root": {"lr_scaling": "sqrt"},
    "warm-up": {**FIXED, "warmup_epochs": 0.5},
    "cosine": {**FIXED, "lr_schedule": "cosine", "lr_final_fraction": 0.1},
    "by steps": {**FIXED, "lr_schedule": "step", "lr_step_epochs": (1, 2.5)},
    "linear": {**FIXED, "warmup_steps": 5, "lr_schedule": "linear"},
    "one cycle": {**FIXED, "lr_schedule": "one_cycle", "learning_rate": 1.0},
    "cyclic": {**FIXED, "lr_schedule": "cyclic"},
    "plateau": {**FIXED, "lr_schedule": "plateau", "warmup_epochs": 1, "lr_final_fraction": 0.01},
    "portable": {"initial_parameters": "portable", "seed": 7},
    "described": {"found": "3 images in 2 classes", "reduction": "fp32, sent as fp16"},
    "bf16": {"precision": "bf16", "checkpoint_activations": True, "compile": True},
    "fp16": {"precision": "fp16"},
    "own optimizer": {"own": OwnRates("Lion", 1e-3, is_default=False), **FIXED, "learning_rate": 1e-3},
    "default rate": {"own": OwnRates("Adam", 1e-3, is_default=True), **FIXED, "learning_rate": 0.02},
    "groups": {"own": OwnRates("AdamW", 1e-3, is_default=False, factors=(0.1, 1.0)), "learning_rate": 1e-3},
    "resumed": {"start": RESUMED},
    "saved by steps": {"save_every": 50, "keep_last": 1, "keep_best": "accuracy"},
    "saved at the end": {"save_every": None, "keep_last": None},
}


def test_the_plan_is_the_golden_one(monkeypatch):
    """Each case has its lines that differ from the first."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first = plan()
    parts = [f"{name:14} {text}" for name, text in first.items()]
    for case, fields in CASES.items():
        found = plan(**fields)
        parts += ["", f"# {case}", *(f"{name:14} -" for name in first if name not in found)]
        parts += [f"{name:14} {text}" for name, text in found.items() if text != first.get(name)]
    text = "\n".join(line.rstrip() for line in parts) + "\n"
    assert text == Path(__file__).with_name("golden").joinpath("plan.txt").read_text()


def test_parameters_that_are_not_trained_are_counted():
    model = ModelInfo({"model/a/kernel": (3, 4)}, 0, "", frozen_parameters=11_176_512)
    assert describe_model(model) == "11,176,524 parameters, 12 of them trained, in 1 tensor"
