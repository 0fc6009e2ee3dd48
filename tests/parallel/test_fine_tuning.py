"""Parameter groups of a config: the same training in both frameworks, resumed in the other one."""

import functools

import numpy as np
from safetensors.numpy import load_file
from support.jobs import Run, temporary_folder
from support.pool import controller_of, train
from support.resuming import TASKS

GROUPS = (
    "parameter_groups=[{match: '*/0/kernel', frozen: true}, "
    "{match: model/0/*, learning_rate_factor: 0.1, weight_decay: 0}]"
)
OPTIONS = ("--task", f"{TASKS}:Fit", "--steps", "8", "--global-batch-size", "8", "--save-every", "4")


@functools.cache
def trained(framework: str, workers: int, *options: str) -> Run:
    words = ("--framework", framework, *OPTIONS, "--set", GROUPS, *options)
    return train(workers, controller_of(framework, workers), *words, cwd=temporary_folder())


def arrays(run: Run, step: int, part: str) -> dict[str, np.ndarray]:
    return load_file(run.folder / "checkpoints" / f"step-{step:08d}" / f"{part}.safetensors")


def test_groups_train_alike_in_both_frameworks_and_when_resumed_in_the_other():
    whole, other = trained("torch", 2), trained("tf", 2)
    np.testing.assert_allclose(whole.losses, other.losses, rtol=1e-4)
    line = "groups         */0/kernel (1): frozen; model/0/* (1): learning rate x 0.1 and weight decay 0"
    assert line in other.result.stdout
    resumed = trained("tf", 1, "--resume", str(whole.folder / "checkpoints" / "step-00000004"))
    np.testing.assert_allclose(resumed.losses, whole.losses[4:], rtol=1e-4)
    before, after = arrays(whole, 4, "model"), arrays(resumed, 8, "model")
    same = {name for name, value in before.items() if (value == after[name]).all()}
    assert same == {"model/0/kernel"}
    assert not any(name.endswith("/0/kernel") for name in arrays(whole, 8, "optimizer"))
