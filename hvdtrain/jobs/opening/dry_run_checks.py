"""What a dry run shows of a task's data, model and loss: plain numbers, without a framework."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.losses import IGNORE_INDEX
from hvdtrain.backends.records import DryRun
from hvdtrain.data.datasets import ArrayDataset, ItemDataset
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.naming import HuggingFaceDataset
from hvdtrain.data.numeric import SEPARATOR, TARGETS, describe_not_finite, distance, leaves_of
from hvdtrain.data.order import unordered
from hvdtrain.errors import DataError, HvdtrainError, NonFiniteLossError, TaskError
from hvdtrain.workers.user_errors import where_raised

_SUM_TOLERANCE = 1e-3  # rows of probabilities add up to 1 so exactly, also in half precision
_FEWEST_VALUES = 32  # fewer outputs of a model that gives logits may all lie in [0, 1] by chance
# relative to the norm: rounding on a GPU is far below, in half precision not so far
_ROUNDING, _HALF_ROUNDING = 1e-3, 2e-2
_SCALES = 30  # how much larger or smaller inputs are on average that were not scaled alike
_OF_SIGMOID = ("precision", "recall", "f1", "mean_iou", "binary_accuracy")
# named metrics that are wrong of a model's probabilities, by what computes these: a sigmoid keeps the order
# of samples, and the largest probability is that of the largest logit
_WRONG_OF = {"sigmoid": _OF_SIGMOID, "softmax": ("auc",)}


@dataclass
class Pass:
    """One micro-batch that a dry run has computed."""

    what: str  # what messages call the data set, such as "training data"
    arrays: Mapping[str, NDArray[Any]]  # name to array (samples, ...) of the micro-batch
    indices: NDArray[np.int64]  # (samples,), the samples' indices in the data set
    result: DryRun  # the outcome of it
    ignore_index: int = IGNORE_INDEX  # the target that does not count
    # (samples,), whether a row is a sample and not padding; None if all are
    is_sample: NDArray[np.bool_] | None = None
    named_loss: str = ""  # name of the task's loss; empty if it is a function
    # the metrics that the task has by name: their kinds, by the task's own names
    named_metrics: Mapping[str, str] = field(default_factory=dict)
    # what more looks at the batch show: a sentence on how a value of a sample depends on other samples
    comparing: str = ""
    error: HvdtrainError | None = None  # what is wrong
    note: str = ""  # what the user should know
    is_random: bool = False  # whether two evaluations of the batch differ
    # whether it may have numbers of its own rows, so that no part of it can be computed
    with_row_numbers: bool = False

    @classmethod
    def of(cls, what: str, batch: HostBatch, result: DryRun, ignore_index: int = IGNORE_INDEX) -> "Pass":
        """Return the pass of a batch's first micro-batch."""
        arrays, indices = {name: array[0] for name, array in batch.arrays.items()}, batch.indices[0]
        is_sample = batch.weights[0] > 0
        if any(len(values) < len(is_sample) for values in result.values.values()):  # there was no padding
            arrays, indices = {name: array[is_sample] for name, array in arrays.items()}, indices[is_sample]
            is_sample = np.ones(len(indices), bool)
        return cls(what, arrays, indices, result, ignore_index, is_sample)

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

    @property
    def logits(self) -> NDArray[Any] | None:
        """The model's output, of several the one of this name; None if it is no array of floats."""
        outputs = self.result.outputs
        outputs = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        return outputs if isinstance(outputs, np.ndarray) and outputs.dtype.kind == "f" else None

    @property
    def is_in_unit_interval(self) -> bool:
        """Whether all outputs lie between 0 and 1."""
        outputs = self.logits
        return outputs is not None and outputs.size > 0 and bool(outputs.min() >= 0 and outputs.max() <= 1)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss of each sample is finite."""
        return bool(np.isfinite(self.result.values.get("loss", 0.0)).all())


def find_error(run: Pass, other: Pass | None = None) -> HvdtrainError | None:
    """Return what makes training impossible or certainly wrong; ``other`` is the training data's pass."""
    error = run.result.error
    if error is None and run.result.refusal is not None:
        return run.result.refusal
    problem = _label_error(run)
    if error is None:
        # a step of the task's own has no named loss: that of the evaluation is the first
        is_first = other is None or not (other.named_loss or other.named_metrics)
        wrong = _probabilities_error(run) if is_first else None
        return problem or wrong or run.error or (None if other else _loss_error(run))
    difference = _difference(run, other) if other else ""
    if problem is None and isinstance(error, HvdtrainError):
        return type(error)(error.problem, f"{difference}\n  {error.remedy}") if difference else error
    if problem is None:
        outputs, has = run.describe_outputs(), f"It has {run.describe_data()}"
        lines = [has + (f"; the model's outputs are {outputs}." if outputs else "."), difference]
        if not run.what.startswith("training") and "does not require grad" in str(error):  # PyTorch's words
            lines.append(
                "An evaluation computes without gradient. Compute derivatives under `with "
                "torch.enable_grad():`, in the model or the loss."
            )
        lines.append("--debug shows the traceback.")
        failed = f"the first batch of the {run.what} fails: {where_raised(error, own_only=True)}"
        problem = TaskError(failed, "\n  ".join(filter(None, lines)))
    problem.__cause__ = error
    return problem


def find_notes(run: Pass) -> Iterator[tuple[str, str]]:
    """Yield what may be meant as it is: its kind, which is noted once, and the text."""
    if found := describe_not_finite(run.arrays, run.indices):
        yield f"data of the {run.what}", f"in the {run.what}, {found}"
    if not run.loss_is_finite:
        yield f"loss of the {run.what}", f"the loss of the first batch of the {run.what} is not finite"
    if run.note:
        yield f"0 of the {run.what}", run.note
    if names := ", ".join(map(repr, run.result.changed_inputs)):
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
    takers = [run.named_loss] if run.named_loss == "binary_cross_entropy" else []
    if not run.named_loss:  # of a loss that is a function, the metrics that a sigmoid before them makes wrong
        takers = [f"metrics[{name!r}]" for name, kind in run.named_metrics.items() if kind in _OF_SIGMOID]
    is_large = run.logits is not None and run.logits.size >= _FEWEST_VALUES
    if takers and run.what.startswith("training") and is_large and run.is_in_unit_interval:
        yield (
            "probabilities",
            f"all outputs for the first batch lie between 0 and 1; {takers[0]} takes logits: if the "
            "model ends in a sigmoid, remove it",
        )


def _difference(run: Pass, other: Pass) -> str:
    """Return how samples of the evaluation data differ from those of the training data, as a sentence."""
    own, expected = ({k: _shape(array[0]) for k, array in one.arrays.items()} for one in (run, other))
    parts = [f"no {name!r}" for name in expected if name not in own]
    parts += [
        f"{name!r} of {kind} per sample in place of {expected[name]}"
        for name, kind in own.items()
        if expected.get(name, kind) != kind
    ]
    return f"Unlike the {other.what}, it has {', '.join(parts)}." if parts else ""


def _label_error(run: Pass) -> HvdtrainError | None:
    """Return the error of class numbers that are missing, or that the model has no output for."""
    outputs, labels = run.logits, {name: run.arrays[name] for name in TARGETS if name in run.arrays}
    if run.named_loss != "cross_entropy" or not labels:
        return None
    if any(array.dtype.kind == "f" and np.isnan(array).any() for array in labels.values()):
        return DataError(  # missing ones make floats of all
            f"in the {run.what}, {describe_not_finite(labels, run.indices)}: the label is missing",
            f"Leave such samples out, such as with frame.dropna(), or number them {run.ignore_index} and "
            "give the task this ignore_index.",
        )
    targets = next(iter(labels.values()))
    if outputs is None or outputs.ndim < 2 or targets.dtype.kind not in "iu":
        return None
    classes = 0  # on the axis that the targets lack
    if np.prod(outputs.shape[:-1]) == targets.size:
        classes = outputs.shape[-1]
    elif (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
        classes = outputs.shape[1]
    wrong = ((targets >= classes) | (targets < 0)) & (targets != run.ignore_index)
    if not classes or not wrong.any():
        return None
    first = int(np.flatnonzero(wrong.reshape(len(targets), -1).any(axis=1))[0])
    value, numbers = int(targets[first][wrong[first]].flat[0]), targets[targets != run.ignore_index]
    reach = f"reach {numbers.max()}" if value >= classes else f"go down to {numbers.min()}"
    remedy = f"Give the model an output for each class, or number classes from 0 to {classes - 1}."
    if classes == 1:
        remedy = "Give the model an output for each class; of one output, the loss is binary_cross_entropy."
    if numbers.max() == classes and numbers.min() == 1:
        remedy = "The classes seem to be numbered from 1: subtract 1 from the targets."
    has = f"{classes} outputs (classes 0 to {classes - 1})" if classes > 1 else "1 output (class 0)"
    problem = f"targets of the {run.what} {reach}, and the model has {has}"
    return DataError(f"{problem}: sample {int(run.indices[first])} has {value}", remedy)


def _probabilities_error(run: Pass) -> HvdtrainError | None:
    """Return the error of a model that gives probabilities to a loss or metrics that take logits."""
    outputs, last, loss = run.logits, run.result.last_activation, run.named_loss
    if outputs is None or not run.is_in_unit_interval:
        return None
    axes = [axis for axis in {1, outputs.ndim - 1} if outputs.ndim > 1 and outputs.shape[axis] > 1]
    sums = [outputs.sum(axis, dtype=np.float64) for axis in axes]
    found = remedy = ""
    if loss == "cross_entropy" and any(np.abs(one - 1).max() <= _SUM_TOLERANCE for one in sums):
        found = "all are between 0 and 1, and each row adds up to 1"
        remedy = (
            "Remove the softmax: nn.Softmax in PyTorch, activation='softmax' in Keras; give "
            "keras.applications classifier_activation=None."
        )
    elif loss == "binary_cross_entropy" and last == "sigmoid":
        found = "the last layer is a sigmoid"
        remedy = "Remove it: nn.Sigmoid in PyTorch, activation='sigmoid' in Keras."
    if found:
        problem = f"the model's outputs are probabilities ({found}), and the loss {loss} takes logits"
        return TaskError(f"{problem}: it computes them itself", remedy)
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
    if run.loss_is_finite:
        return None
    loss = float(run.result.values["loss"].mean())
    if found := describe_not_finite(run.arrays, run.indices):
        return DataError(
            f"the loss of the first batch of the {run.what} is {loss}: {found}",
            "Remove such samples, or replace the values.",
        )
    where = ""
    if run.logits is not None:
        are_finite = np.isfinite(run.logits).all()
        where = ", and the model's outputs are finite" if are_finite else ", not the model's outputs"
    return NonFiniteLossError(
        f"the loss is {loss} for the first batch, before any step; the data are finite{where}",
        "Check the initial weights, the scale of the inputs, and logarithms and divisions in the loss.",
    )


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


def find_broadcast(
    what: str, batch: HostBatch, outputs: Any, compute: Callable[[HostBatch], DryRun]
) -> HvdtrainError | None:
    """Collective. Return the error of a loss or metric that broadcasts (n, 1) with (n,) to (n, n)."""
    # It is looked for where the batch has an array, such as targets, with one number for each sample. Two
    # samples are computed together, and each input with each target alone: if the former are means over rows,
    # columns or all of the latter, they were broadcast.
    count, inputs = batch.weights.shape[1], _inputs_of(batch.arrays)
    numbers = {
        key: array[0]
        for key, array in batch.arrays.items()
        if key not in inputs and array[0].size == count and array.ndim <= 3
    }
    if not numbers or count < 2:
        return None
    values = np.stack([array.reshape(count) for array in numbers.values()], 1)
    rows = [0, max(1, int(np.argmax((values != values[0]).any(1) & (batch.weights[0] > 0))))]
    together = compute(batch.rows(rows))
    alone = [compute(_mixed(batch, i, k)) for i in rows for k in rows]
    if any(result.error is not None for result in (together, *alone)) or not batch.weights[0, rows].all():
        return None
    for name, given in together.values.items():
        table = np.asarray([result.values[name][0] for result in alone]).reshape(2, 2)
        right, means = table.diagonal(), (table.mean(1), table.mean(0), table.sum(1), table.sum(0))
        is_mean = _are_close(given, table.mean()) and not _are_close(given, right.mean())
        is_of_batch = name in together.weighted and _are_close(given, given.mean())
        is_of_all = not _are_close(given, right) and any(_are_close(given, mean) for mean in means)
        if is_mean or (is_of_all and not is_of_batch):
            value = "the loss" if name == "loss" else f"the metric {name!r}"
            counts = {count, np.count_nonzero(batch.weights)}  # the outputs may be without padding
            leaves = [leaf for leaf in leaves_of(outputs) if leaf.ndim and len(leaf) in counts]
            shapes = [f"outputs are {leaf.shape}" for leaf in leaves]
            shapes += [f"{key!r} is {array.shape}" for key, array in numbers.items()]
            found, own = (", ".join(f"{number:.4g}" for number in one) for one in (given, right))
            return TaskError(
                f"{value} compares each sample with all others, as ({count}, 1) and ({count},) are broadcast "
                f"to ({count}, {count}): {', '.join(shapes)}. For two samples of the {what} it is "
                f"{found}; their own values are {own}",
                "Give both the same shape: take the last axis of size 1 away, as outputs.squeeze(-1) does in "
                "PyTorch and tf.squeeze(outputs, -1) in TensorFlow. A mean over the samples is given as "
                "hvdtrain.Weighted(mean, number of samples).",
            )
    return None


def has_row_numbers(dataset: Any, batch: HostBatch) -> bool:
    """Return whether a batch may have numbers of its own rows, such as pairs that ``collate`` made."""
    # They are out of range in a batch of fewer rows, which ends a process that has a GPU.
    if isinstance(unordered(dataset), ArrayDataset | ItemDataset | HuggingFaceDataset):
        return False  # it joins samples, which know of no batch
    count = batch.weights.shape[1]
    return any(
        array.dtype.kind in "iu"
        and array.dtype.itemsize >= 4
        and array.size > 0
        and name.partition(SEPARATOR)[0] not in TARGETS
        and min(2, count - 1) <= array.max() < count  # and no mask
        for name, array in batch.arrays.items()
    )


def _mixed(batch: HostBatch, inputs: int, others: int) -> HostBatch:
    """Return a batch of one sample that has the inputs of a sample, and everything else of another."""
    one, other = batch.rows([inputs]), batch.rows([others])
    return replace(one, arrays={**other.arrays, **{k: one.arrays[k] for k in _inputs_of(one.arrays)}})


def _inputs_of(arrays: Mapping[str, Any]) -> set[str]:
    """Return the names of a batch's inputs: those named so, or else all that are not named as targets."""
    first = {name: name.partition(SEPARATOR)[0] for name in arrays}
    named = {name for name in arrays if first[name] == "inputs"}
    return named or {name for name in arrays if first[name] not in {*TARGETS, "weights"}}


def drawn_note(once: Mapping[str, NDArray[Any]], again: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Return the note on a batch of training data that has other values when it is read again."""
    for name, array in once.items():
        if not are_equal(array, again.get(name, ())):
            return {
                "drawn": f"reading a batch of the training data again gives another {name!r}: the data set, "
                "collate or train_collate draws random numbers anew, so a repeated or resumed run computes "
                "something else, and so does one with another number of workers. Derive them from a sample's "
                "index or from the keys of augmented(); to mix samples, use the options mixup and cutmix"
            }
    return {}


def random_note(what: str, once: DryRun, again: DryRun, *, is_half: bool = False) -> str:
    """Return the note on a batch that is evaluated twice with different results; empty if they agree."""
    pairs = zip(leaves_of(once.outputs), leaves_of(again.outputs), strict=False)
    furthest = max((distance(one, other) for one, other in pairs if one.shape == other.shape), default=0.0)
    losses = [result.values["loss"] for result in (once, again) if "loss" in result.values]
    values = ""
    if len(losses) == 2:
        furthest = max(furthest, distance(*losses))
        values = f"a loss of {losses[0].mean():.4g} and of {losses[1].mean():.4g}, "
    if not furthest > (_HALF_ROUNDING if is_half else _ROUNDING):
        return ""
    return (
        f"evaluating the first batch of the {what} twice gives {values}values that differ by {furthest:.1%}: "
        "the evaluation draws random numbers, as a dropout does that is left on. Pass training=self.training "
        "to functional.dropout; in Keras, do not call a layer with training=True"
    )


def scale_note(what: str, arrays: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]]) -> str:
    """Return the note on inputs that are not scaled as those of the training data; empty if all are."""
    for name in sorted(_inputs_of(arrays)):
        array, other = arrays[name], others.get(name, np.zeros(0))
        if min(array.size, other.size) < 32 or "f" not in array.dtype.kind + other.dtype.kind:
            continue  # too few, or such as numbers of words
        sizes = [float(np.abs(np.nan_to_num(a.astype(np.float64))).mean()) for a in (array, other)]
        if 0 < _SCALES * min(sizes) <= max(sizes):
            return (
                f"{name!r} of the {what} lies between {array.min():.4g} and {array.max():.4g}, that of the "
                f"training data between {other.min():.4g} and {other.max():.4g}: scale both alike"
            )
    return ""


def are_equal(one: NDArray[Any], other: Any) -> bool:
    """Return whether arrays have the same values, NaN too."""
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def _are_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=_ROUNDING, atol=1e-6))
