"""Words of other trainers, and what they are called here."""

import pytest

from hvdtrain.config import Config
from hvdtrain.config.field_names import name_hint

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
