"""A task's own training step: equal curves, several optimizers that are saved and resumed, and refusals."""

import functools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.documents import ROOT
from support.jobs import Run, temporary_folder
from support.pool import command, controller_of, run_suite, train
from support.serving import hvdtrain

from hvdtrain.data.order import ShuffledOrder
from hvdtrain.host.frameworks import FRAMEWORKS

TASKS = Path(__file__).with_name("own_step_tasks.py")
EVERY_STEP = ("--save-every", "1", "--set", "keep_last=null")
CLIPPED = ("--clip-norm", "0.1")  # the gradients of each optimizer by themselves
HALF = 2  # of the steps; the generator of Alternating has not taken one then


def options(framework: str, task: str, *others: str) -> tuple[str, ...]:
    return ("--framework", framework, "--task", f"{TASKS}:{task}", *EVERY_STEP, *others)


@functools.cache
def trained(framework: str, workers: int, task: str, *others: str) -> Run:
    controller = controller_of(framework, workers)
    return train(workers, controller, *options(framework, task, *others), cwd=temporary_folder())


def state(run: Run, step: int) -> dict[str, np.ndarray]:
    folder = run.folder / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("others", [("--clip-norm", "0.5", "--ema-decay", "0.9", "--precision", "bf16")])
def test_a_plain_step_of_ones_own_trains_as_the_usual_one(framework, others):
    usual, own = (trained(framework, 1, task, *others) for task in ("Fit", "Plain"))
    assert own.losses == usual.losses
    assert_same(state(own, 8), state(usual, 8))


@pytest.mark.parametrize("framework", ["torch"])
def test_half_precision_sees_weights_that_change_within_a_step(framework):
    """A cached cast of the weights would make both gradients of SAM the same, and that of a plain step."""
    half = ("--precision", "bf16")
    assert trained(framework, 1, "Sam", *half).losses[2:] != trained(framework, 1, "Plain", *half).losses[2:]


@pytest.mark.parametrize(("framework", "workers", "others"), [("torch", 3, ()), ("tf", 2, CLIPPED)])
def test_curves_do_not_depend_on_the_number_of_workers(framework, workers, others):
    # the last batch of two epochs has 8 samples: workers have padding, and three have parts of unequal length
    epochs = ("--set", "steps=null", "--epochs", "2", *others)
    alone, several = (trained(framework, n, "Gan", *epochs) for n in (1, workers))
    assert len(alone.losses) == 9
    assert several.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize(("framework", "workers"), [("torch", 2), ("tf", 1)])
def test_a_resumed_run_continues_bit_for_bit(framework, workers):
    whole = trained(framework, workers, "Alternating")
    checkpoint = whole.folder / "checkpoints" / f"step-{HALF:08d}"
    resumed = trained(framework, workers, "Alternating", "--resume", str(checkpoint))
    assert resumed.losses == whole.losses[HALF:]
    assert_same(state(resumed, 8), state(whole, 8))
    note = "note: the task's own step took no step with the optimizer 'generator' at its first call"
    assert note in whole.result.stdout


# with PyTorch, test_documented.py trains it
def test_the_example_trains_with_keras():
    task = ("--task", f"{ROOT}/examples/gan.py:DigitGan", "--steps", "2", "--log-every", "1")
    assert len(train(2, "gloo", "--framework", "tf", *task, cwd=temporary_folder()).losses) == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slots_have_the_name_of_their_optimizer_and_rates_scale_alike(framework):
    scaled = ("--set", "global_batch_size=null", "--batch-size", "12", "--steps", "3")
    run = trained(framework, 2, "Gan", *scaled)
    assert "0.04 = 0.02 (the optimizer's own) x 2 (linear rule" in run.result.stdout
    assert "2 parameter groups at 0.04, 0.01" in run.result.stdout
    assert "optimizer      the task's own, generator: SGD, discriminator: Adam" in run.result.stdout
    assert "took no step with the optimizer" not in run.result.stdout
    # Adam moves what has a gradient by its learning rate in the first steps
    kernels = [state(run, step)["model/discriminator/0/kernel"] for step in (1, 2)]
    assert np.median(np.abs(kernels[1] - kernels[0])) == pytest.approx(0.01, rel=0.05)
    names = [name for name in state(run, 3) if name.startswith("optimizer/")]
    slot = {"torch": "momentum", "tf": "momentums"}[framework]  # Keras's own SGD keeps something else
    assert f"optimizer/generator/{slot}/generator/0/kernel" in names
    assert "optimizer/discriminator/step" in names
    assert all(name.split("/")[1] in ("generator", "discriminator") for name in names)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sharpness_aware_minimization_is_that_of_the_formula(framework):
    """Also: the dry run, which goes to the worst point as well, leaves no trace."""
    run = trained(framework, 1, "Sam", "--optimizer", "sgd", "--momentum", "0", "--weight-decay", "0")
    name = next(n for n in state(run, 1) if n.startswith("model/") and n.endswith("kernel"))
    kernel, bias = state(run, 1)[name], state(run, 1)[name.replace("kernel", "bias")]
    inputs, targets = batch_of(run, 1)

    def gradient(kernel, bias):
        errors = inputs @ kernel + bias - targets
        return inputs.T @ errors / len(inputs), errors.mean(0)

    slopes = gradient(kernel, bias)
    far = 0.05 / np.sqrt(sum((slope**2).sum() for slope in slopes))
    slopes = gradient(kernel + far * slopes[0], bias + far * slopes[1])
    np.testing.assert_allclose(state(run, 2)[name], kernel - 0.02 * slopes[0], atol=1e-6)


def batch_of(run: Run, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the samples of a step as the job's order has them."""
    from own_step_tasks import Sam

    inputs, targets = Sam().data
    indices = ShuffledOrder(len(inputs), 0).indices(np.arange(step * 24, step * 24 + 24))
    return inputs[indices], targets[indices]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mistakes_are_refused_with_their_reason(framework):
    commands = [
        (
            options(framework, "StepsAlone"),
            "the task's own step called step() of the optimizer 'main' itself",
        ),
        (options(framework, "NoLoss"), f"neither loss nor {framework}_loss, which say what an evaluation"),
    ]
    if framework == "torch":
        commands.append((options(framework, "Backward"), "the task's own step called backward()"))
    texts = hvdtrain(*[list(words) for words, _ in commands], cwd=temporary_folder(), framework=framework)
    for (_, wanted), (_, error) in zip(commands, texts, strict=True):
        assert wanted in error


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_workers_that_use_different_optimizers_are_told_so(framework):
    result = command(
        2, controller_of(framework, 2), framework, *options(framework, "Apart"), cwd=temporary_folder()
    )
    assert result.returncode == 2
    assert "workers did not make the same calls in the same order: call 2 of a step" in result.stderr


def test_what_a_traced_step_may_do(tmp_path):
    run_suite(Path(__file__).with_name("suite_own_step.py"), 1, "none", "tf", cwd=tmp_path, timeout=500)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_workers_that_weigh_or_return_something_else_are_told_so(framework, tmp_path):
    suite = Path(__file__).with_name("suite_own_step_differs.py")
    run_suite(suite, 2, controller_of(framework, 2), framework, cwd=tmp_path, timeout=500)
