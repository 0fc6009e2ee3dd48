"""What a dry run's results say of a task's data, model and loss: plain numbers, without a framework."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import IGNORE_INDEX
from hvdtrain.backends.records import DryRun
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import TARGETS, describe_not_finite
from hvdtrain.errors import DataError, HvdtrainError, NonFiniteLossError, TaskError
from hvdtrain.workers.user_errors import where_raised

_SUM_TOLERANCE = 1e-3  # rows of probabilities add up to 1 so exactly, also in half precision
_FEWEST_VALUES = 32  # fewer outputs of a model that gives logits may all lie in [0, 1] by chance
# named metrics that are wrong of a model's probabilities, by what computes these
_WRONG_OF = {
    "sigmoid": ("precision", "recall", "f1", "mean_iou", "binary_accuracy"),
    "softmax": ("auc",),
}

# what PyTorch says of a derivative where none is recorded
_NO_GRADIENT = "does not require grad"

Shapes = Mapping[str, str]


@dataclass
class Pass:
    """One micro-batch that a dry run has computed."""

    what: str  # what messages call the data set, such as "training data"
    arrays: Mapping[str, NDArray[Any]]  # name to array (samples, ...) of the micro-batch
    indices: NDArray[np.int64]  # (samples,), the samples' indices in the data set
    result: DryRun  # the outcome of it
    named_loss: str = ""  # name of the task's loss; empty if it is a function
    ignore_index: int = IGNORE_INDEX  # the target that does not count
    # (samples,), whether a row is a sample and not padding; None if all are
    is_sample: NDArray[np.bool_] | None = None
    # a sentence on how a value of a sample depends on other samples; empty if it does not
    comparing: str = ""
    # the metrics that the task has by name: their kinds, by the task's own names
    named_metrics: Mapping[str, str] = field(default_factory=dict)
    error: HvdtrainError | None = None  # what more looks at the batch show to be wrong; None if nothing
    note: str = ""  # what else they show that the user should know
    is_random: bool = False  # whether two evaluations of the batch differ
    # whether it may have numbers of its own rows, so that no part of it can be computed
    with_row_numbers: bool = False

    @classmethod
    def of(
        cls, what: str, batch: HostBatch, result: DryRun, named_loss: str, ignore_index: int = IGNORE_INDEX
    ) -> "Pass":
        """Return the pass of a batch's first micro-batch."""
        arrays, indices = {name: array[0] for name, array in batch.arrays.items()}, batch.indices[0]
        is_sample = batch.weights[0] > 0
        if any(len(values) < len(is_sample) for values in result.values.values()):  # there was no padding
            arrays, indices = {name: array[is_sample] for name, array in arrays.items()}, indices[is_sample]
            is_sample = np.ones(len(indices), bool)
        return cls(what, arrays, indices, result, named_loss, ignore_index, is_sample)

    def describe_data(self) -> str:
        """Return types and shapes of the samples, for a message."""
        return ", ".join(f"{name} {_shape(array)}" for name, array in self.arrays.items())

    def means(self) -> dict[str, float]:
        """Return the loss and the metrics of the samples, by name."""
        chosen = slice(None) if self.is_sample is None else self.is_sample
        means = {name: float(value[chosen].mean()) for name, value in self.result.values.items()}
        return means | dict(self.result.metrics)

    def describe_outputs(self) -> str:
        """Return types and shapes of the model's outputs, for a message; empty if they are not known."""
        return _structure(self.result.outputs)


def find_error(run: Pass, other: Pass | None = None) -> HvdtrainError | None:
    """Return what makes training impossible or certainly wrong, as an error; None if nothing does."""
    error = run.result.error
    if error is None and run.result.refusal is not None:
        return run.result.refusal
    problem = _label_error(run)
    if error is None:
        # a step of the task's own has no named loss: that of the evaluation is the first
        is_first = other is None or not (other.named_loss or other.named_metrics)
        wrong = _probabilities_error(run) if is_first else None
        return problem or wrong or run.error or (None if other else _loss_error(run))
    if problem is None and isinstance(error, HvdtrainError):
        difference = _difference(run, other) if other else ""
        return type(error)(error.problem, f"{difference}\n  {error.remedy}") if difference else error
    problem = problem or _failure(run, other, error)
    problem.__cause__ = error
    return problem


def find_notes(run: Pass) -> Iterator[tuple[str, str]]:
    """Yield what may be meant as it is: its kind, which is noted once, and the text."""
    if found := describe_not_finite(run.arrays, run.indices):
        yield f"data of the {run.what}", f"in the {run.what}, {found}"
    if not _mean_is_finite(run):
        yield f"loss of the {run.what}", f"the loss of the first batch of the {run.what} is not finite"
    if run.note:
        yield f"0 of the {run.what}", run.note
    if run.result.changed_inputs:
        names = ", ".join(map(repr, run.result.changed_inputs))
        yield (
            "changed inputs",
            f"the model changes {names} of its batch in place: the loss, and whatever else reads them later, "
            "gets other values than the data have. Change a copy, such as x.clone()",
        )
    weights = run.arrays.get("weights")
    if weights is not None and not weights.any():
        yield f"weights of the {run.what}", f"all 'weights' of the first batch of the {run.what} are 0"
    if run.result.note:
        yield f"computation of the {run.what}", run.result.note
    outputs = _array_of(run)
    takers = [run.named_loss] if run.named_loss == "binary_cross_entropy" else []
    if not run.named_loss:  # of a loss that is a function, the metrics that a sigmoid before them makes wrong
        wrong = _WRONG_OF["sigmoid"]
        takers = [f"metrics[{name!r}]" for name, kind in run.named_metrics.items() if kind in wrong]
    if (
        takers
        and run.what.startswith("training")
        and outputs is not None
        and outputs.size >= _FEWEST_VALUES
        and _in_unit_interval(outputs)
    ):
        yield (
            "probabilities",
            f"all outputs for the first batch lie between 0 and 1; {takers[0]} takes logits: if the "
            "model ends in a sigmoid, remove it",
        )


def _failure(run: Pass, other: Pass | None, error: Exception) -> HvdtrainError:
    """Return the error that says how a batch failed, with the shapes that it has."""
    outputs = run.describe_outputs()
    lines = [f"It has {run.describe_data()}" + (f"; the model's outputs are {outputs}." if outputs else ".")]
    if other is not None and (difference := _difference(run, other)):
        lines.append(difference)
    if other is not None and _NO_GRADIENT in str(error):
        lines.append(
            "An evaluation computes without gradient. Compute derivatives under `with torch.enable_grad():`, "
            "in the model or the loss."
        )
    lines.append("--debug shows the traceback.")
    problem = f"the first batch of the {run.what} fails: {where_raised(error, own_only=True)}"
    return TaskError(problem, "\n  ".join(lines))


def _difference(run: Pass, other: Pass) -> str:
    """Return how samples of the evaluation data differ from those of the training data, as a sentence."""
    own = {name: _shape(array[0]) for name, array in run.arrays.items()}
    expected = {name: _shape(array[0]) for name, array in other.arrays.items()}
    parts = [f"no {name!r}" for name in expected if name not in own]
    parts += [
        f"{name!r} of {kind} per sample in place of {expected[name]}"
        for name, kind in own.items()
        if expected.get(name, kind) != kind
    ]
    return f"Unlike the {other.what}, it has {', '.join(parts)}." if parts else ""


def _label_error(run: Pass) -> HvdtrainError | None:
    """Return the error of class numbers that are missing, or that the model has no output for."""
    outputs, targets = _array_of(run), _targets(run)
    if run.named_loss != "cross_entropy":
        return None
    named = {name: array for name, array in run.arrays.items() if name in TARGETS}
    if any(array.dtype.kind == "f" and np.isnan(array).any() for array in named.values()):
        return DataError(  # missing ones make floats of all
            f"in the {run.what}, {describe_not_finite(named, run.indices)}: the label is missing",
            f"Leave such samples out, such as with frame.dropna(), or number them {run.ignore_index} and "
            "give the task this ignore_index.",
        )
    if outputs is None or targets is None or outputs.ndim < 2 or targets.dtype.kind not in "iu":
        return None
    classes = _classes(outputs.shape, targets.shape)
    wrong = ((targets >= classes) | (targets < 0)) & (targets != run.ignore_index)
    if not classes or not wrong.any():
        return None
    first = int(np.flatnonzero(wrong.reshape(len(targets), -1).any(axis=1))[0])
    value = int(targets[first][wrong[first]].flat[0])
    numbers = targets[targets != run.ignore_index]
    reach = f"reach {numbers.max()}" if value >= classes else f"go down to {numbers.min()}"
    remedy = f"Give the model an output for each class, or number classes from 0 to {classes - 1}."
    if classes == 1:
        remedy = "Give the model an output for each class; of one output, the loss is binary_cross_entropy."
    if numbers.max() == classes and numbers.min() == 1:
        remedy = "The classes seem to be numbered from 1: subtract 1 from the targets."
    has = f"{classes} outputs (classes 0 to {classes - 1})" if classes > 1 else "1 output (class 0)"
    sample = int(run.indices[first])
    return DataError(
        f"targets of the {run.what} {reach}, and the model has {has}: sample {sample} has {value}", remedy
    )


def _classes(outputs: tuple[int, ...], targets: tuple[int, ...]) -> int:
    """Return the number of classes, on the axis that the targets lack; 0 if shapes do not fit."""
    if np.prod(outputs[:-1]) == np.prod(targets):
        return outputs[-1]
    return outputs[1] if (outputs[0], *outputs[2:]) == targets else 0


def _probabilities_error(run: Pass) -> HvdtrainError | None:
    """Return the error of a model that gives probabilities to a loss or metrics that take logits."""
    # The largest probability is that of the largest logit, and a sigmoid keeps the order of samples: some
    # metrics are right of them.
    outputs, last, loss = _array_of(run), run.result.last_activation, run.named_loss
    if outputs is None or not outputs.size or not _in_unit_interval(outputs):
        return None
    found = layer = remedy = ""
    if loss == "cross_entropy" and outputs.ndim > 1:
        axes = [axis for axis in (1, outputs.ndim - 1) if outputs.shape[axis] > 1]
        if any(np.abs(outputs.sum(axis, dtype=np.float64) - 1).max() <= _SUM_TOLERANCE for axis in axes):
            found, layer = "all are between 0 and 1, and each row adds up to 1", "softmax"
            remedy = (
                "Remove the softmax: nn.Softmax in PyTorch, activation='softmax' in Keras; give "
                "keras.applications classifier_activation=None."
            )
    elif loss == "binary_cross_entropy" and last == "sigmoid":
        found, layer = "the last layer is a sigmoid", "sigmoid"
        remedy = "Remove it: nn.Sigmoid in PyTorch, activation='sigmoid' in Keras."
    if found:
        return TaskError(
            f"the model's outputs are probabilities ({found}), and the loss {loss} takes logits: it computes "
            f"the {layer} itself",
            remedy,
        )
    wrong = _WRONG_OF.get(last, ())
    if (name := next((name for name, kind in run.named_metrics.items() if kind in wrong), None)) is None:
        return None
    return TaskError(
        f"the model's outputs are probabilities (the last layer is a {last}), and metrics[{name!r}] takes "
        "logits",
        f"Remove the {last} and compute it in the loss, or write hvdtrain.SumMetric.",
    )


def _loss_error(run: Pass) -> HvdtrainError | None:
    """Return the error of a loss that is not finite before the first step."""
    if _mean_is_finite(run):
        return None
    loss = float(run.result.values["loss"].mean())
    if found := describe_not_finite(run.arrays, run.indices):
        return DataError(
            f"the loss of the first batch of the {run.what} is {loss}: {found}",
            "Remove such samples, or replace the values.",
        )
    outputs = _array_of(run)
    where = ""
    if outputs is not None:
        are_finite = np.isfinite(outputs).all()
        where = ", and the model's outputs are finite" if are_finite else ", not the model's outputs"
    return NonFiniteLossError(
        f"the loss is {loss} for the first batch, before any step; the data are finite{where}",
        "Check the initial weights, the scale of the inputs, and logarithms and divisions in the loss.",
    )


def _mean_is_finite(run: Pass) -> bool:
    loss = run.result.values.get("loss")
    return loss is None or bool(np.isfinite(loss).all())


def _in_unit_interval(outputs: NDArray[Any]) -> bool:
    return bool(outputs.min() >= 0 and outputs.max() <= 1)


def _array_of(run: Pass) -> NDArray[Any] | None:
    outputs = run.result.outputs
    if isinstance(outputs, Mapping):  # a structured output, as of Hugging Face transformers
        outputs = outputs.get("logits")
    return outputs if isinstance(outputs, np.ndarray) and outputs.dtype.kind == "f" else None


def _targets(run: Pass) -> NDArray[Any] | None:
    return next((run.arrays[name] for name in TARGETS if name in run.arrays), None)


def _structure(outputs: Any) -> str:
    if isinstance(outputs, np.ndarray):
        return _shape(outputs)
    if isinstance(outputs, Mapping):
        return ", ".join(f"{name} {_structure(value)}" for name, value in outputs.items())
    if isinstance(outputs, tuple | list):
        return f"({', '.join(_structure(value) for value in outputs)})"
    return "" if outputs is None else type(outputs).__name__


def _shape(array: NDArray[Any]) -> str:
    return f"{array.dtype} {tuple(array.shape)}"
