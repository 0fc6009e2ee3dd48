"""Options that change nothing are said, if the user set them."""

import pytest

from hvdtrain.config import Layer
from hvdtrain.config.layers import resolve
from hvdtrain.jobs.opening.limits import unreached_parts, unused_options
from hvdtrain.jobs.opening.start import given_fields
from hvdtrain.training_plan import TrainingPlan

TASK = Layer("defaults of task t", {"framework": "torch", "momentum": 0.5, "lr_final_fraction": 0.1})


def notes(*layers: Layer, own_optimizer: bool = False, has_eval_data: bool = True) -> list[str]:
    config = resolve([TASK, *layers])
    given = given_fields(layers, config)
    return unused_options(config, given, own_optimizer=own_optimizer, has_eval_data=has_eval_data)


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({"optimizer": "sgd", "momentum": 0.8}, []),
        ({"optimizer": "lamb", "momentum": 0.0, "adam_beta1": 0.8}, ["momentum 0"]),
        ({"adam_beta2": 0.99, "adam_epsilon": 1e-6}, ["adam_beta2 0.99", "adam_epsilon 1e-06"]),
        ({"decay_norms_and_biases": False, "weight_decay": 0.1}, []),
        ({"lr_step_epochs": [3], "lr_step_factor": 0.5}, ["lr_step_epochs [3.0]", "lr_step_factor 0.5"]),
        ({"lr_final_fraction": 0.2, "lr_schedule": "plateau", "plateau_factor": 0.5}, []),
        ({"early_stopping_patience": 5, "early_stopping": "loss"}, []),
        ({"base_batch_size": 256, "lr_scaling": "none"}, ["base_batch_size 256"]),
        ({"global_batch_size": 64, "lr_scaling": "sqrt"}, ["lr_scaling sqrt"]),
        ({"global_batch_size": 64, "lr_scaling": "sqrt", "base_batch_size": 32}, []),
        ({"outer_momentum": 0.5, "sync_every": 4, "outer_optimizer": "nesterov"}, []),
        ({"lr_scaling": "sqrt", "sync_every": 4, "global_batch_size": 64}, ["lr_scaling sqrt"]),
        ({"read_workers": 2, "read_threads": 4}, ["read_threads 4"]),
    ],
    ids=str,
)
def test_an_option_without_effect_is_named_with_its_value(fields, unused):
    found = notes(Layer("options", fields))
    assert [note.partition(" has no effect: ")[0] for note in found] == unused


def test_an_optimizer_of_the_task_uses_no_option_and_without_evaluation_data_nothing_is_evaluated():
    fields = {"optimizer": "adamw", "weight_decay": 0.5, "momentum": 0.5, "clip_norm": 1.0}
    found = notes(Layer("options", fields), own_optimizer=True)
    assert [note.split()[0] for note in found] == ["optimizer", "momentum", "weight_decay"]
    layer = Layer("train()", {"eval_every": 10, "eval_batch_size": 4})
    assert notes(layer) == []
    found = notes(layer, has_eval_data=False)
    assert [note.split()[0] for note in found] == ["eval_every", "eval_batch_size"]


def test_the_config_of_another_run_is_no_request():
    """It lists all fields; a value that is not the default was one."""
    config = resolve([TASK, Layer("options", {"weight_decay": 0.1, "adam_beta1": 0.8})])
    repeated = Layer("config.yaml", config.model_dump(exclude={"epochs", "batch_size"}), is_file=True)
    found = notes(repeated, Layer("options", {"optimizer": "lars", "momentum": 0.9}))
    assert [note.split()[0] for note in found] == ["adam_beta1", "lr_final_fraction"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"warmup_epochs": 2, "epochs": 2}, ""),
        ({"warmup_epochs": 5, "epochs": 2, "learning_rate": 0.1}, "ends at 0.04, below its peak of 0.1"),
        ({"lr_schedule": "step", "lr_step_epochs": [1, 2, 30]}, "lr_step_epochs 2, 30 come after"),
        ({"lr_schedule": "plateau", "plateau_patience": 1}, "too short for lr_schedule plateau"),
        ({"lr_schedule": "plateau", "plateau_patience": 1, "epochs": 3}, ""),
        ({"batch_size": 300}, "a step has 300 samples, 3 times the 100 of the training data; 1 step in all"),
        ({"profile": "5-90"}, "profile 5-90: training ends after step 7"),
    ],
)
def test_what_the_training_does_not_reach_is_noted(fields, said):
    config = resolve([TASK, Layer("options", {"epochs": 2, "warmup_epochs": 0, **fields})])
    found = list(unreached_parts(config, TrainingPlan.of(config, 1, 100)))
    assert len(found) == bool(said)
    assert said in "".join(found)
