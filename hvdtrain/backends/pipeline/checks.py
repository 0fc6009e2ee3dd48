"""Models that cannot be split, in either framework, and the errors of their blocks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

_RELATIVE, _ABSOLUTE = 1e-3, 1e-5  # by which outputs of blocks may differ from the model's

_PARTS = {"torch": "modules", "tf": "layers"}


def blocks_of(
    task: Any, model: Any, framework: str, of_sequential: Sequence[Any] | None, loss_trains: bool = False
) -> list[Any]:
    """Return the blocks of a model: what the task gives, or those that it has as a sequential one."""
    if loss_trains:
        raise TaskError(
            "the task's loss has parameters, which are in no block of the model and so in no stage of it",
            "Leave stages out, or compute them in the model.",
            everywhere=True,
        )
    method, name = FRAMEWORKS[framework].blocks_method, type(model).__name__
    own = getattr(task, method, None)
    if own is None and of_sequential is not None:
        return list(of_sequential)
    if own is None:
        raise TaskError(
            f"the model, a {name}, cannot be divided into stages: a Sequential is divided into its "
            f"{_PARTS[framework]}; of other models, the task says what their blocks are",
            f"Give the task {method}(model): a list of the {_PARTS[framework]} that are called one after the "
            "other, or hvdtrain.Block(function, *parts) of several; of a functional Keras model, "
            "[keras.Model(model.input, x), keras.Model(x, model.output)] with x the output of a layer.",
            everywhere=True,
        )
    try:
        given = own(model)
    except Exception as error:
        problem = f"it fails for the model, a {name}: {type(error).__name__}: {error}"
        raise wrong_blocks(framework, problem) from error
    is_ordered = isinstance(given, Iterable) and not isinstance(given, set | frozenset)
    blocks = list(given) if is_ordered else []
    wrong = next((f"a {type(block).__name__} among them" for block in blocks if not callable(block)), None)
    if wrong or not blocks:
        must = f"it must give a list of {_PARTS[framework]} or of hvdtrain.Block"
        raise wrong_blocks(framework, f"{must}, found {wrong or repr(given)}")
    return blocks


def wrong_blocks(framework: str, problem: str) -> TaskError:
    """Return the error of blocks that a task gives and that do not make up its model."""
    return TaskError(
        f"{FRAMEWORKS[framework].blocks_method}(): {problem}",
        "The blocks, called one after the other, must compute what the model does, and have all parameters. "
        "hvdtrain.Block(function, *parts) names the modules or layers that a function uses.",
        everywhere=True,
    )


def owners_of(framework: str, fields: Sequence[Any], blocks: Sequence[set[int]]) -> list[list[int]]:
    """Return for each portable array of a model the blocks that have its tensors, by their identities."""
    owners = []
    for field in fields:
        held = [[id(tensor) in own for tensor in field.tensors] for own in blocks]
        having = [number for number, has in enumerate(held) if any(has)]
        if not having:
            raise wrong_blocks(framework, f"no block has the model's {field.path.replace('/', '.')}")
        if not all(all(held[number]) for number in having):
            raise wrong_blocks(framework, f"a block has only a part of {field.path}")
        owners.append(having)
    return owners


def check_one_owner(path: str, stages: Sequence[int]) -> None:
    """Check that what changes without a gradient, such as the statistics of batch norm, is in one stage."""
    if len(stages) > 1:
        raise TaskError(
            f"{path} is in the stages {', '.join(str(stage + 1) for stage in stages)}: each would move it",
            "Use the layer in one block only, or in blocks of one stage (stage_cuts).",
            everywhere=True,
        )


def check_outputs(framework: str, outputs: Callable[[bool, bool], Sequence[Any]]) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, as text.

    ``outputs`` takes whether the model is in training, and whether its blocks compute in its place.
    """
    for training in (False, True):
        expected, found = outputs(training, False), outputs(training, True)
        if len(expected) == len(found) and all(map(_is_close, expected, found)):
            continue
        problem = "the blocks compute other outputs than the model for the first batch"
        if not training:
            raise wrong_blocks(framework, problem)
        return (
            f"in training, {problem}, with the same random numbers; unless they draw them in another order, "
            "the curve is not that of the model"
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
    """Return the error of a block that computes with a tensor, by its path, of a block of another stage."""
    return TaskError(
        f"a block of the model uses {path} of a block of another stage, which this worker does not have",
        "hvdtrain.Block(function, *parts) names the modules or layers that a function uses.",
    )
