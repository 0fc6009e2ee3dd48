"""Making a task, with the checks of its options, of its methods, and of names that it may have misspelt."""

import dis
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdtrain.config.field_names import is_misspelt, task_advice
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.task import MEMBERS, GivenTask, did_you_mean
from hvdtrain.workers.user_errors import task_errors

_READS = ("LOAD_ATTR", "LOAD_METHOD")


def make_task(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any], framework: str) -> Any:
    """Construct a task and check that it has the required attributes.

    Raises:
        TaskError: If the constructor does not accept the options or raises, or an attribute is missing.
    """
    _check_options(task_class, spec, options)
    with task_errors(f"task {spec} cannot be constructed"):
        task = task_class(**options)
    for name in ("train_data", "eval_data"):
        if not callable(getattr(task, name, None)):
            hint = _hint_at(task, name) or "docs/tasks.md lists what a task needs."
            raise TaskError(f"task {spec} has no method {name}()", hint)
    wanted = FRAMEWORKS[framework].model_method
    if not callable(getattr(task, wanted, None)):
        methods = [row.model_method for row in FRAMEWORKS.values()]
        other = next((name for name in methods if callable(getattr(task, name, None))), None)
        remedy = f"It has {other}(): use the other --framework, or add {wanted}()." if other else ""
        remedy = _hint_at(task, wanted) or remedy
        raise TaskError(f"task {spec} has no method {wanted}(), which --framework {framework} needs", remedy)
    row = FRAMEWORKS[framework]
    if not any(hasattr(task, name) for name in ("loss", row.loss_method, row.step_method)):
        hint = _hint_at(task, "loss") or _hint_at(task, row.loss_method)
        raise TaskError(f"task {spec} has neither loss nor {framework}_loss(model, batch)", hint)
    _check_signatures(task, spec, framework)
    return task


def _check_options(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any]) -> None:
    if isinstance(task_class, GivenTask) and options:
        raise TaskError(
            f"task {spec} was passed as an instance, so task_options must be empty; found {options}",
            "Give the options to its constructor, or pass the class.",
        )
    try:
        signature = inspect.signature(task_class)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not takes_any:
            hint = did_you_mean(name, parameters) or (
                f"It takes {', '.join(parameters)}." if parameters else "It takes none."
            )
            raise TaskError(f"task {spec} has no option {name!r} (from task_options)", hint)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise TaskError(
            f"task {spec}: {error}", "Set it with --set task_options.NAME=VALUE or in the config file."
        ) from None


def _check_signatures(task: Any, spec: str, framework: str) -> None:
    """Check that the task's methods for a framework take the arguments that they are called with.

    Raises:
        TaskError: naming the method and how to write it.
    """
    row = FRAMEWORKS[framework]
    of_framework = (row.model_method, row.loss_method, row.optimizer_method)
    of_step = (row.step_method, row.optimizers_method)
    for method in ("train_data", "eval_data", *of_framework, *of_step):
        arguments = MEMBERS.get(method) or ()
        try:
            signature = inspect.signature(getattr(task, method, None))  # type: ignore[arg-type]
        except (TypeError, ValueError):  # there is none, or it is not written in Python
            continue
        try:
            signature.bind(*arguments)
        except TypeError as error:
            call = f"{method}({', '.join(arguments)})"
            raise TaskError(
                f"task {spec}: {method}{signature} cannot be called as {call}: {error}",
                f"Write def {method}({', '.join(('self', *arguments))}).",
            ) from None


def notes_on_members(task: Any) -> list[str]:
    """Return notes on members of a task that are misspelt, or that other trainers have."""
    return [
        f"the task has {_called(name, _is_method(task, name))}, which hvdtrain does not know; {meant}"
        for name, meant in unknown_members(task).items()
    ]


def unknown_members(task: Any) -> dict[str, str]:
    """Return members of a task that hvdtrain does not use, but seems meant to, by name with what is meant.

    It is empty for a known member, and for one that the task's own code reads. What a class of a library
    gives is not looked at.
    """
    classes = [kind for kind in type(task).__mro__ if _is_users(kind)]
    spaces = [getattr(task, "__dict__", {}), *map(vars, classes)]
    read = {name for kind in classes for value in vars(kind).values() for name in _read_by(value)}
    found = {}
    for name, members in ((name, space) for space in spaces for name in space):
        if name in MEMBERS or name in read or name.startswith("_"):
            continue
        near = next((known for known in MEMBERS if is_misspelt(name, known)), "")
        if near and members.get(near) is None:
            found[name] = f"did you mean {_called(near, MEMBERS[near] is not None)}?"
        elif advice := task_advice(name):
            found[name] = advice
    return found


def _hint_at(task: Any, missing: str) -> str:
    """Return what a task may have in place of a member that it lacks, as a sentence; empty if nothing is."""
    for name, meant in unknown_members(task).items():
        if re.search(rf"\b{missing}\b", meant):
            return f"It has {_called(name, _is_method(task, name))}: {meant}"
    return ""


def _is_method(task: Any, name: str) -> bool:
    return callable(inspect.getattr_static(task, name, None))  # a property is not computed


def _called(name: str, is_method: bool) -> str:
    return f"{name}()" if is_method else name


def _is_users(kind: type) -> bool:
    """Return whether a class is written by the user, and comes from no library."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None) or ""
    is_installed = kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "hvdtrain")
    return kind.__module__ == "__main__" or not (is_installed or "-packages" in path)


def _read_by(value: Any) -> Iterator[str]:
    """Yield the names of attributes that the code of a class's member reads."""
    if isinstance(value, property):
        value = value.fget
    codes = [getattr(getattr(value, "__func__", value), "__code__", None)]
    while codes:
        if (code := codes.pop()) is not None:
            yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in _READS)
            codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
