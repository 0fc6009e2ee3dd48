"""The plan in words: what a person is told before training."""

import re
from dataclasses import replace

import pytest
from support.fakes import FakeWorkers, make_session
from support.states import make_record

from hvdtrain.backends.base import ModelInfo, OwnRates
from hvdtrain.jobs.plan_text import describe_model, describe_plan
from hvdtrain.jobs.resume import ResumePoint

NEW = ResumePoint()


def plan(
    hosts=("alpha", "alpha", "beta", "beta"),
    *,
    settings=None,
    own=None,
    start=NEW,
    found="",
    norms=0,
    leaves_out=False,
    reduction="fp32, sent uncompressed",
    **fields,
) -> dict[str, str]:
    """Give the plan's lines by their name; the title goes by ""."""
    workers = FakeWorkers(0, list(hosts), None, [])
    session = make_session("runs/x", workers, **{"train_size": 1797, "eval_size": 360, **fields})
    session.state.progress = start.progress
    text = describe_plan(
        session,
        session.plan(),
        model=replace(
            session.backend.model_info(),
            batch_norm_layers=norms,
            reduction=reduction,
            own_rates=own,
            leaves_out_padding=leaves_out,
        ),
        hosts=list(hosts),
        build="0.28.1 with MPI",
        settings=settings or {},
        start=start,
        found=found,
    )
    title, *lines = text.splitlines()
    return {"": title} | {line[2:16].strip(): line[17:] for line in lines}


def test_parameters_that_are_not_trained_are_counted():
    model = ModelInfo({"model/a/kernel": (3, 4)}, 0, "", frozen_parameters=11_176_512)
    assert describe_model(model) == "11,176,524 parameters, 12 of them trained, in 1 tensor"
    assert describe_model(replace(model, frozen_parameters=0)) == "12 parameters in 1 tensor"


def test_the_title_names_task_and_framework():
    assert plan()[""].endswith(": digits with Fake 1.0 on the desk")


def test_the_plan_names_everything_that_decides_the_run():
    assert list(plan(settings={"A": "1"})) == [
        "", "workers", "model", "data", "batch", "length", "learning rate", "optimizer",
        "precision", "gradients", "checkpoints", "Horovod", "set for you", "run directory",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "fields", "said"),
    [
        (
            "optimizer",
            {"optimizer": "lars", "momentum": 0.8, "weight_decay": 1e-4},
            "lars, momentum 0.8, trust coefficient 0.001, weight decay 0.0001",
        ),
        (
            "optimizer",
            {"optimizer": "lamb", "weight_decay": 0.01},
            "lamb, betas 0.9 and 0.999, weight decay 0.01",
        ),
        ("regularised", {"label_smoothing": 0.1}, "label smoothing 0.1 in training, none in evaluation"),
        (
            "regularised",
            {"label_smoothing": 0.1, "ema_decay": 0.999},
            "label smoothing 0.1 in training, none in evaluation; evaluation by a moving average of the "
            "weights, decay 0.999",
        ),
        (
            "stops early",
            {"early_stopping": "accuracy", "early_stopping_patience": 1},
            "after 1 evaluation in a row without a higher accuracy",
        ),
        ("stops early", {"early_stopping": "loss"}, "after 3 evaluations in a row without a lower loss"),
    ],
)
def test_what_regularises_is_said(line, fields, said):
    assert plan(**fields)[line] == said


def test_what_is_not_set_is_not_said():
    assert "set for you" not in plan(settings={}, threads=1)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["alpha"], "1 on alpha"),
        (["alpha"] * 2, "2 on 1 host (alpha: 2), coordinated by MPI"),
        (["alpha", "beta", "alpha"], "3 on 2 hosts (alpha: 2, beta: 1), coordinated by MPI"),
    ],
)
def test_workers_are_counted_by_host(hosts, said):
    assert plan(hosts)["workers"] == said


def test_many_hosts_fit_in_a_line():
    said = plan([f"h{i}" for i in range(20)])["workers"]
    assert said.endswith("h7: 1, ...), coordinated by MPI")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "128 a step = 32 per worker x 4 workers"),
        ({"accumulate": 2}, "256 a step = 32 per worker x 4 workers x 2 micro-batches"),
        ({"global_batch_size": 48}, "48 a step = 12 per worker x 4 workers"),
        (
            {"global_batch_size": 50},
            "50 a step, at most 13 per worker x 4 workers, the shorter parts padded with weight 0",
        ),
    ],
)
def test_the_batch_is_taken_apart(fields, said):
    assert plan(**fields)["batch"] == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            "warning: 20 layers over each worker's 32 samples, not the 128 of all, so the curve depends on "
            "the number of workers; see --sync-batch-norm",
        ),
        (
            {"global_batch_size": 50},
            "warning: 20 layers over each worker's 13 samples, not the 50 of all, so the curve depends on "
            "the number of workers; padding (a repeated sample) counts in the statistics; see "
            "--sync-batch-norm",
        ),
        (
            {"global_batch_size": 50, "leaves_out": True},
            "warning: 20 layers over each worker's 13 samples, not the 50 of all, so the curve depends on "
            "the number of workers; see --sync-batch-norm",
        ),
        (
            {"global_batch_size": 50, "accumulate": 4, "hosts": ["alpha"]},
            "warning: 20 layers over each micro-batch of 13 samples; padding (a repeated sample) counts "
            "in the statistics; see --sync-batch-norm",
        ),
        ({"sync_batch_norm": True}, "20 layers over the 128 samples of all workers' micro-batches"),
        (
            {"sync_batch_norm": True, "accumulate": 2, "hosts": ["alpha"]},
            "20 layers over the 32 samples of all workers' micro-batches",
        ),
        ({"sync_batch_norm": True, "norms": 0}, "the model has none, so --sync-batch-norm changes nothing"),
    ],
)
def test_batch_norm_is_said_with_the_samples_that_it_sees(fields, said):
    assert plan(**{"norms": 20, **fields})["batch norm"] == said


def test_batch_norm_of_one_worker_goes_without_saying():
    assert "batch norm" not in plan(["alpha"], norms=20)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "15 steps = 1 epoch, evaluation every epoch"),
        ({"epochs": 2, "eval_every": None}, "29 steps = 2 epochs, evaluation at the end"),
        (
            {"epochs": None, "steps": 100, "eval_every": 10},
            "100 steps = 7.123 epochs, evaluation every 10 steps",
        ),
        ({"eval_size": 0}, "15 steps = 1 epoch"),
    ],
)
def test_the_length_is_said_in_steps_and_epochs(fields, said):
    assert plan(**fields)["length"] == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "0.04 = 0.01 x 4 (linear rule: global batch 128, quoted for 32), constant"),
        ({"lr_scaling": "sqrt"}, "0.02 = 0.01 x 2 (sqrt rule: global batch 128, quoted for 32), constant"),
        ({"lr_scaling": "none"}, "0.01, constant"),
        ({"global_batch_size": 48}, "0.01, constant"),
        ({"lr_scaling": "none", "warmup_epochs": 0.5}, "0.01, after a warm-up of 0.5 epochs, constant"),
        (
            {"lr_scaling": "none", "lr_schedule": "cosine", "lr_final_fraction": 0.1},
            "0.01, cosine to 0.001",
        ),
        (
            {"lr_scaling": "none", "lr_schedule": "step", "lr_step_epochs": (1, 2.5)},
            "0.01, x 0.1 at epochs 1, 2.5",
        ),
        (
            {"lr_scaling": "none", "warmup_steps": 5, "lr_schedule": "linear"},
            "0.01, after a warm-up of 5 steps, linear to 0",
        ),
        (
            {"lr_scaling": "none", "lr_schedule": "one_cycle", "learning_rate": 1.0},
            "1, one cycle: from 0.04 up to the peak at 30 % of the training and down to 4e-06",
        ),
        ({"lr_scaling": "none", "lr_schedule": "cyclic"}, "0.01, cycles of 2 epochs down to 0"),
        (
            {"lr_scaling": "none", "lr_schedule": "plateau", "warmup_epochs": 1, "lr_final_fraction": 0.01},
            "0.01, after a warm-up of 1 epoch, x 0.1 after 2 evaluations in a row without a lower loss, "
            "down to 0.0001",
        ),
    ],
)
def test_the_learning_rate_is_said_with_its_rule_and_schedule(fields, said):
    assert plan(**fields)["learning rate"] == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"momentum": 0.0}, "sgd"),
        ({"momentum": 0.9, "weight_decay": 1e-4}, "sgd, momentum 0.9, weight decay 0.0001"),
        ({"optimizer": "adamw", "clip_norm": 1.0}, "adamw, gradient clipped to norm 1"),
    ],
)
def test_the_optimizer_is_said_with_what_it_uses(fields, said):
    assert plan(**{"weight_decay": 0.0, **fields})["optimizer"] == said


@pytest.mark.parametrize("reduction", ["fp32, sent uncompressed", "fp32, sent as fp16"])
def test_how_gradients_are_reduced_is_said_as_the_backend_describes_it(reduction):
    assert plan(reduction=reduction)["gradients"] == reduction


def test_the_model_is_counted():
    assert plan()["model"].startswith("16 parameters in 2 tensors; ")


@pytest.mark.parametrize(
    ("origin", "said"),
    [("portable", "initial values drawn by name from seed 7"), ("model", "as the task made them, seed 7")],
)
def test_the_initial_values_have_an_origin(origin, said):
    assert plan(initial_parameters=origin, seed=7)["model"].endswith(said)


@pytest.mark.parametrize(
    ("eval_size", "said"), [(360, "1,797 samples to train, 360 to evaluate"), (0, "1,797 samples to train")]
)
def test_the_data_is_counted(eval_size, said):
    assert plan(eval_size=eval_size)["data"] == said


def test_a_task_that_describes_its_data_is_quoted():
    assert plan(found="3 images in 2 classes")["data"] == "3 images in 2 classes"


def test_what_was_set_for_the_user_is_said():
    assert plan(settings={"A": "1", "B": "2"}, threads=1)["set for you"] == "A=1, B=2"


def test_the_share_of_compute_threads_is_said_where_the_user_left_it_open(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert re.fullmatch(r"A=1, \d+ compute threads? per worker", plan(settings={"A": "1"})["set for you"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan(settings={"A": "1"})["set for you"] == "A=1"


def test_one_worker_is_told_its_threads_as_well(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert re.fullmatch(r"\d+ compute threads? per worker", plan(["alpha"])["set for you"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "fp32"),
        ({"precision": "bf16"}, "bf16, weights fp32"),
        ({"precision": "fp16"}, "fp16, weights fp32, loss scaled"),
        (
            {"precision": "bf16", "checkpoint_activations": True, "compile": True},
            "bf16, weights fp32; activations of repeated blocks computed twice; compiled",
        ),
    ],
)
def test_the_plan_says_what_the_model_computes_in(fields, said):
    assert plan(**fields)["precision"] == said


def test_an_optimizer_of_the_task_is_called_so():
    own = OwnRates("Lion", 1e-3, is_default=False)
    assert plan(own=own, clip_norm=2)["optimizer"] == "the task's own, Lion, gradient clipped to norm 2"


@pytest.mark.parametrize(
    ("own", "fields", "said"),
    [
        (OwnRates("Lion", 1e-3, is_default=False), {}, "0.001 (the optimizer's own), constant"),
        (
            OwnRates("Adam", 1e-3, is_default=True),
            {"learning_rate": 0.02},
            "0.02 (in place of the optimizer's default 0.001), constant",
        ),
        (
            OwnRates("AdamW", 1e-3, is_default=False, factors=(0.1, 1.0)),
            {"lr_scaling": "linear"},
            "0.004 = 0.001 (the optimizer's own) x 4 (linear rule: global batch 128, quoted for 32), "
            "constant; 2 parameter groups at 0.0004, 0.004",
        ),
    ],
)
def test_rates_of_the_tasks_own_optimizer_are_said_as_such(own, fields, said):
    given = {"learning_rate": own.base, "lr_scaling": "none", **fields}
    assert plan(own=own, **given)["learning rate"] == said


RESUMED = ResumePoint(
    origin="runs/y/checkpoints/step-00000004: step 4, sample 512 (epoch 0.28)",
    manifest=make_record(4, samples=512),
    changes=("batch_size 64 -> 32", "workers 2 -> 4"),
)


def test_a_run_that_goes_on_says_from_where_and_with_what_changed():
    found = plan(start=RESUMED)
    assert found["starts from"] == RESUMED.origin
    assert found["changed"] == "batch_size 64 -> 32, workers 2 -> 4"


def test_a_run_that_goes_on_says_what_is_left():
    assert plan(start=RESUMED)["length"] == "15 steps = 1 epoch, 11 steps to go, evaluation every epoch"


def test_a_run_from_a_checkpoint_has_no_initial_values():
    assert plan(start=RESUMED)["model"] == "16 parameters in 2 tensors"


def test_a_new_run_names_no_origin():
    assert not {"starts from", "changed"} & set(plan())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "every epoch and at the end, keeping the last 3"),
        ({"save_every": 50, "keep_last": 1}, "every 50 steps and at the end, keeping the last 1"),
        ({"save_every": None, "keep_last": None}, "at the end, keeping all"),
        (
            {"keep_best": "accuracy"},
            "every epoch and at the end, keeping the last 3 and the one with the best accuracy",
        ),
    ],
)
def test_saving_is_said_with_what_is_kept(fields, said):
    assert plan(**fields)["checkpoints"] == said
