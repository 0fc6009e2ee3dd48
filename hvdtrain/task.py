"""Task and Dataset, the interfaces that a user implements, and loading a task by name or path."""

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import load_triton
from hvdtrain.storage.files import expand_task
from hvdtrain.storage.text import did_you_mean, some
from hvdtrain.workers.user_errors import task_errors

Arrays = dict[str, NDArray[Any]]

# what a task can have: attributes, and methods
ATTRIBUTES = (
    "loss", "metrics", "ignore_index", "class_weights", "class_axis", "per_worker_loss", "defaults",
    "state_names", "state_reductions", "callbacks",
)  # fmt: skip
MEMBERS = (
    "train_data", "eval_data", "predict_data", "torch_model", "tf_model", "torch_loss", "tf_loss",
    "torch_optimizer", "tf_optimizer", "torch_optimizers", "tf_optimizers", "torch_step", "tf_step",
    "torch_blocks", "tf_blocks", "torch_serve", "tf_serve", "collate", "train_collate",
    "sample_probabilities", "sample_lengths", "learning_rate_factor", "describe", *ATTRIBUTES,
)  # fmt: skip


# prefix for modules of task files, which other processes cannot import by name
FILE_MODULE_PREFIX = "hvdtrain_task_"


@runtime_checkable
class Dataset(Protocol):
    """A fixed number of samples, each a mapping of names to arrays.

    The model receives ``"inputs"``, which can be a mapping or a tuple of arrays, or without it the keys
    that it takes by name. The loss compares its outputs with ``"targets"``, ``"labels"`` or
    ``"label"``. Other keys are passed to the task's own loss and metrics. A data set can also have
    these methods:

    - ``batch(indices)`` returns several samples at once, stacked along a new first axis;
    - ``augmented(indices, keys)`` does the same for training and augments each sample at random.
      ``keys`` holds a 64-bit seed for each sample, which depends on the job's seed, the epoch and
      the index.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return one sample as a mapping of names to arrays or to values that numpy converts."""


class Task(Protocol):
    """The data and the model of a job.

    A task is any class with these attributes; it does not have to inherit from this class. Its
    constructor receives ``task_options`` as keyword arguments. Optional attributes:

    - ``defaults``: mapping of config fields to the task's default values;
    - ``metrics``: mapping of names to metrics, each of the same form as ``loss``, or one of a whole
      evaluation: its name, a ``SumMetric`` or a ``GatheredMetric``;
    - ``torch_loss(model, batch)`` / ``tf_loss(model, batch)``: (loss per sample, {metric name:
      value per sample}) in place of the model call, ``loss`` and ``metrics``;
    - ``torch_blocks(model)`` / ``tf_blocks(model)``: the parts of the model that ``stages`` divides among
      workers: modules or layers that are called one after the other, or ``hvdtrain.Block``;
    - ``ignore_index``: the target that named losses and metrics leave out, -100 by default;
    - ``class_weights``: for the loss ``cross_entropy``, a weight for each class;
    - ``torch_optimizer(parameters)`` / ``tf_optimizer()``: an optimizer that replaces
      the config's; its learning rates are used if ``learning_rate`` is not set;
    - ``torch_step(model, batch, optimizers)`` / ``tf_step(model, batch, optimizers)``: a training step of its
      own, which computes losses and lets optimizers minimize them; returns what ``torch_loss`` does;
    - ``torch_optimizers(model)`` / ``tf_optimizers(model)``: the optimizers of such a step, by name;
    - ``collate(samples)``: a batch of a list of samples, in place of stacking them;
    - ``train_collate(samples)``: the same for training alone;
    - ``sample_probabilities()``: a number for each training sample, by which an epoch draws with replacement;
    - ``sample_lengths()``: a length for each training sample, so that a batch has samples of similar length;
    - ``learning_rate_factor(progress)``: what the peak learning rate is multiplied by at
      ``progress.epoch`` of ``progress.epochs``, in place of the other schedules;
    - ``class_axis``: the axis of the classes in outputs, -1 or 1, if shapes do not show;
    - ``torch_serve(model, batch)`` / ``tf_serve(model, batch)``: the outputs of predictions and exported
      programs, if they are not the model's, or if the task's own ``torch_loss`` or ``tf_loss`` calls it;
    - ``predict_data()``: the data that ``hvdtrain predict`` goes over, which needs no targets;
    - ``state_names``: for "torch" and "tf", a mapping of the model's module paths to the names that
      both models share, for example ``{"torch": {"features.0": "conv1"}}``;
    - ``state_reductions``: how state that no optimizer updates is combined over workers before it is
      evaluated or saved: a mapping of patterns of portable names to "rank0", "mean" or "max";
    - ``describe()``: a line of text for the plan that describes the data;
    - ``callbacks``: a list of objects with methods of ``hvdtrain.Callback``, or a method that returns one.
    """

    # a name such as "cross_entropy", or a function (outputs, batch) -> one value per sample, or Weighted
    loss: Any

    def train_data(self) -> Any:
        """Return the training data: a Dataset, or an object that ``as_dataset`` wraps."""

    def eval_data(self) -> Any:
        """Return the evaluation data in the same form; several sets as ``hvdtrain.EvalSets``; or None."""


def built_in_names() -> list[str]:
    """Return the names of the built-in tasks: their module names, with dashes."""
    package = importlib.import_module("hvdtrain.tasks")
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))


def load_task_class(spec: str) -> Callable[..., Any]:
    """Return a task's class, or a function that returns a task."""
    try:
        spec = expand_task(spec)
    except ValueError as error:
        raise TaskError(f"task {spec}: {error}") from None
    place, colon, name = spec.rpartition(":")
    if not colon:
        return _built_in(spec)
    load_triton()  # the module may import TensorFlow
    found = module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            own = [key for key, one in vars(module).items() if hasattr(one, "train_data")]
            own = [key for key in own if getattr(vars(module)[key], "__module__", "") == module.__name__]
            hint = did_you_mean(name, own) or f"Its tasks: {some(own, 10) or 'none'}."
            raise TaskError(f"task {spec}: {place} has no {name!r}", hint)
        found = getattr(found, part)
    if not callable(found):
        raise TaskError(f"task {spec}: {name} is a {type(found).__name__}, not a class")
    return found


class GivenTask:
    """Takes the place of a task's class if the caller made the task: called, it returns that object."""

    def __init__(self, task: Any) -> None:
        self._task = task
        defaults = getattr(task, "defaults", {})
        if isinstance(defaults, Mapping):  # options are for a constructor, which has been called
            defaults = {name: value for name, value in defaults.items() if name != "task_options"}
        self.defaults = defaults

    def __call__(self) -> Any:
        """Return the task."""
        return self._task


def _is_instance(task: object) -> bool:
    return not isinstance(task, str | type) and hasattr(task, "train_data")


def task_class_of(task: Any) -> Callable[..., Any] | None:
    """Return what makes the task that a user passed: its class or function; None if it is a name."""
    if task is None or isinstance(task, str):
        return None
    return GivenTask(task) if _is_instance(task) else task


def task_spec(task: object) -> str:
    """Return the spec by which another process loads a task that was passed as a class or an instance."""
    if isinstance(task, str):
        return task
    named = type(task) if _is_instance(task) else task
    name = getattr(named, "__qualname__", None)
    module = sys.modules.get(getattr(named, "__module__", None) or "")
    if name is None or module is None:
        raise TaskError(
            f"task must be the class of a task, an instance of one, or a name; found a {type(task).__name__}",
            "`hvdtrain docs tasks` lists what a task needs: its data, its model and its loss.",
        )
    if module.__name__ == "__main__" and getattr(module, "__file__", None):
        return f"{module.__file__}:{name}"
    return f"{module.__name__}:{name}"


def _built_in(name: str) -> Callable[..., Any]:
    names = built_in_names()
    if name not in names:
        if name.endswith(".py"):
            raise TaskError(f"task {name} names a file but no class", f"Write {name}:MyTask.")
        hint = did_you_mean(name, names)
        raise TaskError(
            f"there is no built-in task {name!r}",
            hint or f"Built-in: {', '.join(names)}. Your own: package.module:Task or path/to/file.py:Task.",
        )
    module = importlib.import_module(f"hvdtrain.tasks.{name.replace('-', '_')}")
    found: Callable[..., Any] = module.task
    return found


def _import_module(name: str) -> ModuleType:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise TaskError(f"task module {name!r} is neither a module's name nor a .py file")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with task_errors(f"task module {name} cannot be imported"):
        return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task file {path} does not exist (looked in {Path.cwd()})")
    name = FILE_MODULE_PREFIX + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # modules in the same folder can be imported, as when Python runs the file
    sys.path.insert(0, str(path.resolve().parent))
    with task_errors(f"task file {path} cannot be imported"):
        spec.loader.exec_module(module)
    return module
