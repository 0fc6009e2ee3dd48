"""Task and Dataset: what a user supplies, and how a task is found by its name or path."""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from hvdtrain.errors import HvdtrainError, TaskError

Arrays = dict[str, NDArray[Any]]

# modules of tasks that lie in a file, which no other process could import by name
FILE_MODULE_PREFIX = "hvdtrain_task_"

# the task method that builds the model for each framework
MODEL_METHODS = {"torch": "torch_model", "tf": "tf_model"}


@runtime_checkable
class Dataset(Protocol):
    """A fixed number of samples, each a mapping of names to arrays.

    The model is given ``"inputs"`` and the loss compares with ``"targets"``; other keys pass
    through to the task's own loss and metrics. A data set may also have ``batch(indices)``,
    which fetches many samples at once, stacked along a new first axis; and
    ``augmented(indices, keys)``, which does so for training, each sample changed at random by the
    64-bit seed that ``keys`` holds for it (a function of the job's seed, the epoch and the index).
    """

    def __len__(self) -> int:
        """Give the number of samples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Give one sample as a mapping of names to arrays (anything that numpy converts)."""
        ...


class Task(Protocol):
    """What a job trains: its data once, its model per framework.

    A task is any class with these names; it need not inherit from this one. Its constructor takes
    ``task_options`` as keyword arguments. Optional names beside these:

    - ``defaults``: mapping of config values that suit the task;
    - ``metrics``: mapping of names to metrics, each as ``loss`` is;
    - ``torch_loss(model, batch)`` / ``tf_loss(model, batch)``: (loss per sample, {metric name:
      value per sample}) in place of the model call, ``loss`` and ``metrics``;
    - ``torch_optimizer(parameters)`` / ``tf_optimizer()``: an optimizer in place of the
      config's; the learning rate stays the config's;
    - ``state_names``: mapping of "torch" and "tf" to mappings of the model's own module paths to
      those that both models share, such as ``{"torch": {"features.0": "conv1"}}``;
    - ``describe()``: what data was found, a line of text for the plan.
    """

    loss: Any  # a name such as "cross_entropy", or a function (outputs, batch) -> one value per sample

    def train_data(self) -> Any:
        """Give the training data: a Dataset or what ``as_dataset`` wraps."""
        ...

    def eval_data(self) -> Any:
        """Give the evaluation data, likewise, or None."""
        ...


def built_in_names() -> list[str]:
    """Give the names of the built-in tasks: those of their modules, with dashes."""
    package = importlib.import_module("hvdtrain.tasks")
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))


def load_task_class(spec: str) -> Callable[..., Any]:
    """Find a task's class (or a function that makes a task).

    Args:
        spec: a built-in task's name, ``package.module:Task`` or ``path/to/file.py:Task``.

    Raises:
        TaskError: where nothing of that name can be imported, saying why.
    """
    place, colon, name = spec.rpartition(":")
    if not colon:
        return _built_in(spec)
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise TaskError(f"task {spec}: {place} has no {name!r}", _did_you_mean(name, _classes(module)))
        found = getattr(found, part)
    if not callable(found):
        raise TaskError(f"task {spec}: {name} is a {type(found).__name__}, not a class")
    return found


def make_task(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any], framework: str) -> Any:
    """Construct a task and check that it has what a job needs.

    Raises:
        TaskError: where the options do not fit its constructor, it raises, or a name is missing.
    """
    _check_options(task_class, spec, options)
    try:
        task = task_class(**options)
    except HvdtrainError:
        raise
    except Exception as error:
        raise TaskError(f"task {spec} cannot be constructed: {where_raised(error)}") from error
    for name in ("train_data", "eval_data"):
        if not callable(getattr(task, name, None)):
            raise TaskError(f"task {spec} has no method {name}()", "docs/tasks.md shows what a task needs.")
    wanted, other = MODEL_METHODS[framework], MODEL_METHODS["tf" if framework == "torch" else "torch"]
    if not callable(getattr(task, wanted, None)):
        has_other = callable(getattr(task, other, None))
        remedy = f"It has {other}(): use the other --framework, or add {wanted}()." if has_other else ""
        raise TaskError(f"task {spec} has no method {wanted}(), which --framework {framework} needs", remedy)
    if not hasattr(task, "loss") and not hasattr(task, f"{framework}_loss"):
        raise TaskError(f"task {spec} has neither loss nor {framework}_loss(model, batch)")
    return task


def task_spec(task: object) -> str:
    """Give the spec under which another process finds a task that was passed as a class or name."""
    if isinstance(task, str):
        return task
    name = getattr(task, "__qualname__", None)
    module = sys.modules.get(getattr(task, "__module__", ""))
    if name is None or module is None:
        raise TaskError(f"task must be a class or a name, found a {type(task).__name__}")
    if module.__name__ == "__main__" and getattr(module, "__file__", None):
        return f"{module.__file__}:{name}"
    return f"{module.__name__}:{name}"


class RaisedInReader(Exception):
    """What the code of a data set raised in a reader process, for its worker to raise.

    Args:
        where: the exception, with the place that raised it.
        traceback_text: its traceback, from there.
    """

    def __init__(self, where: str, traceback_text: str) -> None:
        super().__init__(where)
        self.where = where
        self.traceback_text = traceback_text


def where_raised(error: BaseException) -> str:
    """Say an exception of a user's code with the place that raised it, in one or two lines."""
    if isinstance(error, RaisedInReader):
        return error.where
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    said = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user_code(f.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {said}" if frames else said


def _is_user_code(filename: str) -> bool:
    return "importlib" not in filename and filename != __file__


def _built_in(name: str) -> Callable[..., Any]:
    names = built_in_names()
    if name not in names:
        if name.endswith(".py"):
            raise TaskError(f"task {name} names a file but no class", f"Write {name}:MyTask.")
        hint = _did_you_mean(name, names)
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
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TaskError(f"task module {name} cannot be imported: {where_raised(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task file {path} does not exist (looked in {Path.cwd()})")
    name = FILE_MODULE_PREFIX + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # modules that lie beside the file can be imported, as when Python runs it
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TaskError(f"task file {path} cannot be imported: {where_raised(error)}") from error
    return module


def _check_options(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(task_class)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not takes_any:
            hint = _did_you_mean(name, parameters) or (
                f"It takes {', '.join(parameters)}." if parameters else "It takes none."
            )
            raise TaskError(f"task {spec} has no option {name!r} (from task_options)", hint)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise TaskError(
            f"task {spec}: {error}", "Give it with --set task_options.NAME=VALUE or in the config file."
        ) from None


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def _classes(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isclass(value)]
