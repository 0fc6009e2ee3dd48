"""Words of other trainers, and what they are called here."""

import pytest

from hvdtrain.config import Config
from hvdtrain.config.field_names import name_hint, value_hint

FIELDS = Config.model_fields


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "Did you mean 'learning_rate'?"),
        ("LR", "Did you mean 'learning_rate'?"),
        ("bs", "Did you mean 'batch_size'?"),
        ("batch", "Did you mean 'batch_size'?"),
        ("wd", "Did you mean 'weight_decay'?"),
        ("max-epochs", "Did you mean 'epochs'?"),
        ("--num-workers", "Did you mean 'read_workers'?"),
        ("amp", "Did you mean 'precision'?"),
        ("fp16", "Did you mean 'precision'?"),
        ("gpus", "The launcher starts the workers: horovodrun -np 2 python -m hvdtrain"),
        ("np", "The launcher starts the workers"),
        ("nproc", "The launcher starts the workers"),
        ("log_level", "There are no log levels: --debug shows the traceback"),
        ("min_lr", "Did you mean 'lr_final_fraction'?"),
        ("batchsize", "Did you mean 'batch_size'?"),
        ("zzzz", ""),
        (3, ""),
    ],
)
def test_a_name_is_recognized(name, hint):
    found = name_hint(name, FIELDS)
    assert found.startswith(hint)
    assert bool(found) == bool(hint)


@pytest.mark.parametrize(
    ("field", "value", "nullable", "hint"),
    [
        ("optimizer", "adam", False, "adamw with weight_decay 0 is Adam"),
        ("clip_norm", "None", True, "write null for no value"),
        ("clip_norm", "none", True, "write null for no value"),
        ("batch_size", "None", False, ""),
        ("device", "cuda", False, "write gpu"),
        ("clip_norm", [1], True, ""),
    ],
)
def test_a_value_is_recognized(field, value, nullable, hint):
    assert value_hint(field, value, nullable) == hint
