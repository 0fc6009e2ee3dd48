"""Models that cannot be split, in either framework, and the errors of their blocks."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from hvdtrain.backends.records import Shapes
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.storage.text import counted
from hvdtrain.workers.user_errors import where_raised


def shapes_of_stages(
    fields: Iterable[Any], owners: Sequence[Sequence[int]], shapes: Shapes, stages: int
) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trainable parameters of each stage, by portable name.

    Args:
        fields: the model's portable arrays.
        owners: the stages that have each of them.
        shapes: of the trainable ones.
        stages: number of stages.
    """
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(stages)]
    for field, having in zip(fields, owners, strict=True):
        if field.name in shapes:
            for stage in having:
                found[stage][field.name] = shapes[field.name]
    return found


def describe_stages(firsts: Sequence[int], blocks: int, shapes: Sequence[Shapes]) -> list[str]:
    """Return what each stage has, as text.

    Args:
        firsts: the first block of each stage.
        blocks: number of blocks.
        shapes: of the trainable parameters of each stage.
    """
    ends = [*firsts[1:], blocks]
    lines = []
    for stage, (first, end, of_stage) in enumerate(zip(firsts, ends, shapes, strict=True), 1):
        which = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
        count = sum(map(math.prod, of_stage.values()))
        lines.append(f"stage {stage}: {which}, {counted(count, 'parameter')}")
    return lines


Outputs = Callable[[bool], Sequence[Any]]

_RELATIVE, _ABSOLUTE = 1e-3, 1e-5  # by which outputs of blocks may differ from the model's

_CAN_BE_CUT = {
    "torch": "an nn.Sequential is divided into its modules",
    "tf": "a Sequential of Keras is divided into its layers",
}
_OF_GRAPHS = {
    "torch": "",
    "tf": "; of a functional model, such as [keras.Model(model.input, x), keras.Model(x, model.output)] with "
    "x the output of a layer",
}


def gives_blocks(task: Any, framework: str) -> bool:
    """Return whether a task says what the blocks of its model are.

    Args:
        task: the task.
        framework: "torch" or "tf".
    """
    return getattr(task, FRAMEWORKS[framework].blocks_method, None) is not None


def given_blocks(task: Any, model: Any, framework: str, kinds: Any) -> list[Any]:
    """Return the blocks of a model that its task gives.

    Args:
        task: the task.
        model: the model.
        framework: "torch" or "tf".
        kinds: the class or classes of lists that are taken.

    Raises:
        TaskError: If it gives none, or something else.
    """
    name = type(model).__name__
    if not gives_blocks(task, framework):
        raise _cannot_be_cut(framework, f"a {name}")
    try:
        given = getattr(task, FRAMEWORKS[framework].blocks_method)(model)
    except Exception as error:
        problem = f"it fails for the model, a {name}: {type(error).__name__}: {error}"
        raise wrong_blocks(framework, problem) from error
    blocks = list(given) if isinstance(given, kinds) else []
    wrong = next((block for block in blocks if not callable(block)), None)
    if not blocks or wrong is not None:
        found = repr(given) if not blocks else f"a {type(wrong).__name__} among them"
        of = {"torch": "modules", "tf": "layers"}[framework]
        raise wrong_blocks(framework, f"it must give a list of {of} or of hvdtrain.Block, found {found}")
    return blocks


def _cannot_be_cut(framework: str, found: str) -> TaskError:
    method = FRAMEWORKS[framework].blocks_method
    return TaskError(
        f"the model, {found}, cannot be divided into stages: {_CAN_BE_CUT[framework]}; of other models, the "
        "task says what their blocks are",
        f"Give the task {method}(model): a list of the modules or layers that are called one after the "
        f"other, or hvdtrain.Block(function, *parts) of several{_OF_GRAPHS[framework]}.",
        everywhere=True,
    )


def loss_has_parameters() -> TaskError:
    """Return the error of a loss that has parameters, which belong to no stage."""
    return TaskError(
        "the task's loss has parameters, which are in no block of the model and so in no stage of it",
        "Leave stages out, or compute them in the model.",
        everywhere=True,
    )


def wrong_blocks(framework: str, problem: str) -> TaskError:
    """Return the error of blocks that a task gives and that do not make up its model."""
    method = FRAMEWORKS[framework].blocks_method
    return TaskError(
        f"{method}(): {problem}",
        "The blocks, called one after the other, must compute what the model does, and each parameter "
        "must be in one of them. hvdtrain.Block(function, *parts) names the modules or layers that a "
        "function uses.",
        everywhere=True,
    )


def check_outputs(framework: str, of_model: Outputs, of_blocks: Outputs) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, as text.

    Args:
        framework: "torch" or "tf".
        of_model: computes the model for the first batch, in training or in evaluation, from equal random
            states; returns its outputs one after the other, as arrays of numpy where they are tensors.
        of_blocks: computes the blocks likewise.

    Raises:
        TaskError: If they compute something else in evaluation, or cannot be computed.
    """
    for training in (False, True):
        expected = of_model(training)
        try:
            found = of_blocks(training)
        except TaskError:
            raise
        except Exception as error:
            problem = f"the blocks cannot be called one after the other: {where_raised(error, own_only=True)}"
            raise wrong_blocks(framework, problem) from error
        same = len(expected) == len(found) and all(map(_is_close, expected, found))
        if not same and training:
            return (
                "in training, the blocks compute other outputs than the model for the first batch, with the "
                "same random numbers; unless they draw them in another order, the curve is not that of the "
                "model"
            )
        if not same:
            raise wrong_blocks(
                framework, "the blocks compute other outputs than the model for the first batch"
            )
    return ""


def _is_close(expected: Any, found: Any) -> bool:
    if not (isinstance(expected, np.ndarray) and isinstance(found, np.ndarray)):
        return bool(expected == found)
    if expected.shape != found.shape:
        return False
    one, other = expected.astype(np.float64), found.astype(np.float64)
    scale = max(float(np.abs(one).max(initial=0.0)), 1e-30)
    return np.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE * scale, equal_nan=True)


def uses_another_stage(path: str) -> TaskError:
    """Return the error of a block that computes with what a block of another stage has.

    Args:
        path: its portable path.
    """
    return TaskError(
        f"a block of the model uses {path} of a block of another stage, which this worker does not have",
        "hvdtrain.Block(function, *parts) names the modules or layers that a function uses.",
    )


def several_calls() -> TaskError:
    """Return the error of a loss that calls the model more than once."""
    return TaskError("the task's loss calls the model several times", "With stages, it has to call it once.")


class _FirstCall(BaseException):
    """What a model was called with; no error, and none that a task may catch."""


def first_call(
    compute: Callable[[Callable[..., NoReturn]], object],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a loss calls the model for a micro-batch.

    Args:
        compute: computes the loss; is given what to call in place of the model.

    Raises:
        TaskError: If it does not call the model.
    """

    def raise_call(*arguments: Any, **named: Any) -> NoReturn:
        raise _FirstCall(arguments, named)

    try:
        compute(raise_call)
    except _FirstCall as call:
        arguments, named = call.args
        return arguments, named
    raise TaskError("the task's loss does not call the model", "With stages, it has to call it once.")


def has_no_part(name: str, model_has_it: bool) -> Exception:
    """Return the error of a loss that uses something of the model but its call.

    If the model does not have it, the error is that of the model, so that a loss may ask whether it is there.
    """
    problem = f"the loss uses the model's {name}"
    if not model_has_it:
        return AttributeError(f"{problem}, which it does not have")
    return TaskError(
        f"{problem}; with stages, no worker has the whole model, and the loss can only call it once",
        "Let the model return what the loss needs, or train without --stages.",
    )
